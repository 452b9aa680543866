"""Reference losses and advantages in numpy and float64, one sequence at a time, from the papers' formulas.

A sequence is a dict of arrays [n] over its trained tokens: `logp` log π_θ, `prox`, `beh`, `ref`, and `adv`. Each loss
gives one number per token. `c` holds the constants of a resolved learner config. No code is shared with the code under
test.
"""

from __future__ import annotations

import math

import numpy as np


def ppo(r, adv, c):
    """PPO's loss token by token, with ifs in place of min and clip."""
    out = []
    for ratio, a in zip(r, adv, strict=True):
        inside = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
        gain = min(ratio * a, inside * a)
        if c.dual_clip and a < 0:
            gain = max(gain, c.dual_clip * a)
        out.append(-gain)
    return np.array(out)


def bounded_weight(w, c):
    """The weight that each correction computes from π_prox/π_b."""
    if c.correction == "none":
        return np.ones_like(w)
    if c.correction == "icepop":
        return np.array([x if c.correction_floor <= x <= c.correction_cap else 0.0 for x in w])
    if c.correction_mode == "mask":
        return np.array([x if x <= c.correction_cap else 0.0 for x in w])
    return np.array([min(x, c.correction_cap) for x in w])


def clipped(s, c):
    if c.correction == "tis":
        return tis(s, c)
    return bounded_weight(np.exp(s["prox"] - s["beh"]), c) * ppo(np.exp(s["logp"] - s["prox"]), s["adv"], c)


def tis(s, c):
    rho = np.exp(s["logp"] - s["beh"])
    if c.ratio_level == "sequence":
        rho = np.full_like(rho, np.prod(rho))
    return -np.minimum(rho, c.correction_cap) * s["adv"] * s["logp"]


def gspo(s, c):
    n = len(s["logp"])
    ratio = math.prod(np.exp(s["logp"] - s["prox"])) ** (1 / n)
    w = np.array([math.prod(np.exp(s["prox"] - s["beh"]))])
    return bounded_weight(w, c)[0] * ppo([ratio] * n, s["adv"], c)


def cispo(s, c):
    out = []
    for logp, beh, a in zip(s["logp"], s["beh"], s["adv"], strict=True):
        rho = math.exp(logp - beh)
        weight = min(max(rho, 1 - c.clip_low), 1 + c.clip_high)
        drop = (a > 0 and rho > 1 + c.clip_high) or (a < 0 and rho < 1 - c.clip_low)
        out.append(0.0 if drop and c.correction_mode == "mask" else -weight * a * logp)
    return np.array(out)


def topr(s, c):
    rho = np.exp(s["logp"] - s["beh"])
    if c.ratio_level == "sequence":
        rho = np.full_like(rho, np.exp(np.sum(s["logp"] - s["beh"])))
    out = []
    for logp, ratio, a in zip(s["logp"], rho, s["adv"], strict=True):
        weight = c.positive_weight if a > 0 else c.negative_weight * min(max(ratio, 0.0), 1.0)
        out.append(-weight * a * logp)
    return np.array(out)


def likelihood(s, c):
    return -s["adv"] * s["logp"]


def dpo(better, worse, c):
    """The loss of a pair."""
    margin = sum(better["logp"] - better["ref"]) - sum(worse["logp"] - worse["ref"])
    return -math.log(1 / (1 + math.exp(-c.dpo_beta * margin)))


def kl_penalty(s, c):
    apart = s["ref"] - s["logp"]
    k = {"k2": apart**2 / 2, "k3": np.exp(apart) - apart - 1}[c.kl_estimator]
    return c.kl_coef * np.minimum(np.exp(s["logp"] - s["beh"]), c.correction_cap) * k


LOSSES = {
    "grpo": clipped, "dapo": clipped, "dr_grpo": clipped, "icepop": clipped, "tis": clipped, "reinforce_pp": clipped,
    "rloo": clipped, "raft_pp": clipped, "gigpo": clipped, "gspo": gspo, "cispo": cispo, "topr": topr,
    "raft": likelihood, "ppo": clipped,
}  # fmt: skip


def value_loss(values, before, targets, clip):
    """The clipped value loss, one state at a time: the larger of the losses of the value and of its clipped form."""
    out = []
    for value, start, target in zip(values, before, targets, strict=True):
        held = min(max(value, start - clip), start + clip) if clip else value
        out.append(max((value - target) ** 2, (held - target) ** 2) / 2)
    return np.array(out)


def value_slopes(values, before, targets, clip, step=1e-6):
    """The slopes of `value_loss` below and above each value, by differences: two numbers where the loss has a kink."""
    here = value_loss(values, before, targets, clip)
    below, above = (value_loss(values + sign * step, before, targets, clip) for sign in (-1, 1))
    return (here - below) / step, (above - here) / step


def aggregated(losses: list[np.ndarray], kind: str, length: int) -> float:
    """The batch's loss from per-token losses, sequence by sequence."""
    losses = [np.asarray(of_tokens) for of_tokens in losses if len(of_tokens)]
    if not losses:
        return 0.0
    if kind == "token_mean":
        return float(np.mean(np.concatenate(losses)))
    per_sequence = {
        "seq_mean_token_mean": lambda x: x.mean(),
        "seq_mean_token_sum": lambda x: x.sum(),
        "constant_length": lambda x: x.sum() / length,
    }[kind]
    return float(np.mean([per_sequence(of_tokens) for of_tokens in losses]))


# --- advantages


def group_std(rewards):
    if len(rewards) < 2 or np.ptp(rewards) < 1e-9:  # the mean of equal numbers may differ from them in the last bit
        return np.zeros(len(rewards))
    return (rewards - np.mean(rewards)) / np.std(rewards, ddof=1)


def leave_one_out(rewards):
    if len(rewards) < 2:
        return np.zeros(len(rewards))
    return np.array([r - np.mean(np.delete(rewards, i)) for i, r in enumerate(rewards)])


def gae(rewards, values, discount, decay):
    """The sum of discounted δ, written as a double loop."""
    n, ahead = len(rewards), [*values[1:], 0.0]
    delta = [rewards[t] + discount * ahead[t] - values[t] for t in range(n)]
    return np.array([sum((discount * decay) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])


def returns(rewards, discount):
    n = len(rewards)
    return np.array([sum(discount ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)])


def segment_return(episodes, discount):
    """episodes: lists of (state, reward); the standardized return of every turn."""
    return group_std(np.concatenate([returns([r for _, r in episode], discount) for episode in episodes]))


def best(members):
    """members: (reward, whether it can be trained on); 1 for the first of the best, if above 0 or above another."""
    kept = [(reward, place) for place, (reward, trainable) in enumerate(members) if trainable]
    earned, out = {reward for reward, _ in kept}, [0.0] * len(members)
    if any(reward > 0 for reward in earned) or len(earned) > 1:
        out[min((-reward, place) for reward, place in kept)[1]] = 1.0
    return out


def best_worst(members):
    """1 for the first of the best, −1 for the first of the worst, if they differ."""
    kept = [(reward, place) for place, (reward, trainable) in enumerate(members) if trainable]
    out = [0.0] * len(members)
    if len({reward for reward, _ in kept}) > 1:
        out[min((-reward, place) for reward, place in kept)[1]] = 1.0
        out[min(kept)[1]] = -1.0
    return out


def gigpo(episodes, discount, step_weight):
    """episodes: lists of (state, reward); advantages of every step."""
    totals = group_std(np.array([sum(r for _, r in episode) for episode in episodes]))
    gained = [returns([r for _, r in episode], discount) for episode in episodes]
    out = []
    for i, episode in enumerate(episodes):
        for k, (state, _) in enumerate(episode):
            same = [gained[j][m] for j, other in enumerate(episodes) for m, (s, _) in enumerate(other) if s == state]
            mine = [(j, m) for j, other in enumerate(episodes) for m, (s, _) in enumerate(other) if s == state]
            out.append(totals[i] + step_weight * group_std(np.array(same))[mine.index((i, k))])
    return out
