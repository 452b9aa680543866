"""Clients of the Tinker API with the public SDK, unmodified. Arguments: the action, the server's URL and key, more.

    check DATA           log-probs at several temperatures, of sampling and training, and of saved weights
    learn DATA SEED      a supervised loop, then RL: accuracy before, between and after
    tenants COUNT        COUNT models at once, each of its own client, taught another answer
    ordered COUNT        COUNT clients at once send requests whose order matters, without and with waiting for each
    outlive FILE         sample, wait until FILE exists, and sample again
    stay                 begin a session with a model and a sample, print its id, and wait to be killed

DATA is a JSON file: a list of {"prompt": ids, "answer": ids}. The last line printed is a JSON object.
"""

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types


def service(url: str, key: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=key)


def model_name(url: str, key: str) -> str:
    return (
        tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result().supported_models[0].model_name
    )


def datum(prompt: list[int], answer: list[int], **inputs: list[float]) -> types.Datum:
    """One sequence whose answer is trained on."""
    ids, padding = prompt + answer, [0.0] * (len(prompt) - 1)
    inputs = inputs or {"weights": [1.0] * len(answer)}
    arrays = {name: np.array(padding + list(values), np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": np.array(ids[1:]), **arrays}
    )


def params(tokens: int, temperature: float = 1.0, seed: int | None = None) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)


def check(url: str, key: str, file: str) -> dict:
    rows, client = json.loads(Path(file).read_text()), service(url, key)
    trained = client.create_lora_training_client(base_model=model_name(url, key), rank=8, seed=1).result()
    for _ in range(3):
        done = trained.forward_backward([datum(**row) for row in rows[:32]], "cross_entropy")
        trained.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        done.result()
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = rows[40]["prompt"]
    given = types.ModelInput.from_ints(prompt)

    def drawn(temperature: float) -> dict[int, float]:
        many = sampler.sample(prompt=given, num_samples=64, sampling_params=params(1, temperature, 7)).result()
        return {one.tokens[0]: one.logprobs[0] for one in many.sequences}

    plain = {
        token: sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, token])).result()[-1]
        for temperature in (0.5, 1.0, 1.8)
        for token in drawn(temperature)
    }
    scaled, pairs = 0.0, 0
    for temperature in (0.5, 1.0, 1.8):
        found = drawn(temperature)
        for one in found:
            for other in found:
                difference = (plain[one] - plain[other]) / temperature
                scaled, pairs = max(scaled, abs(found[one] - found[other] - difference)), pairs + (one != other)
    apart, repeated = 0.0, 0
    long = sampler.sample(prompt=given, num_samples=4, sampling_params=params(8, 0.5, 42)).result().sequences
    for sequence in long:
        for at, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
            begun = types.ModelInput.from_ints([*prompt, *sequence.tokens[:at]])
            alone = sampler.sample(prompt=begun, num_samples=32, sampling_params=params(1, 0.5, 100 + at)).result()
            same = [one.logprobs[0] for one in alone.sequences if one.tokens == [token]]
            apart, repeated = max([apart, *(abs(one - logprob) for one in same)]), repeated + bool(same)
    many = sampler.sample(prompt=given, num_samples=16, sampling_params=params(12, 1.0, 3)).result().sequences
    again = sampler.sample(prompt=given, num_samples=16, sampling_params=params(12, 1.0, 3)).result().sequences
    outputs = trained.forward([datum(prompt, list(one.tokens)) for one in many], "cross_entropy").result()
    mismatch = max(
        np.abs(np.array(output["logprobs"].data)[len(prompt) - 1 :] - np.array(one.logprobs)).max()
        for output, one in zip(outputs.loss_fn_outputs, many, strict=True)
    )
    state, saved = trained.save_state("state").result().path, trained.save_weights_for_sampler("sampler").result().path
    probe = types.ModelInput.from_ints(rows[41]["prompt"] + rows[41]["answer"])
    snapshot, named = (
        one.compute_logprobs(probe).result()[1:]
        for one in (sampler, client.create_sampling_client(model_path=saved).result())
    )
    resumed = client.create_training_client_from_state_with_optimizer(state).result()
    after = []
    for one in (trained, resumed):
        one.forward_backward([datum(**row) for row in rows[:32]], "cross_entropy")
        one.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        after.append(one.forward([datum(**rows[50])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    losses = {}
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        one = many[0]
        data = datum(prompt, list(one.tokens), logprobs=list(one.logprobs), advantages=[1.0] * len(one.tokens))
        losses[loss] = trained.forward_backward([data], loss).result().metrics["loss:sum"]
    try:
        trained.forward_backward([datum(**rows[0])], "ppo").result()
        refused = ""
    except tinker.RequestFailedError as error:
        refused = str(error)
    info = trained.get_info()
    client.close("success").result()
    return {
        "scaled": float(scaled),
        "pairs": pairs,
        "apart": float(apart),
        "repeated": repeated / sum(len(one.tokens) for one in long),
        "mismatch": float(mismatch),
        "losses": losses,
        "refused": refused,
        "same_seed": [one.tokens for one in many] == [one.tokens for one in again],
        "different": len({tuple(one.tokens) for one in many}),
        "saved": np.allclose(snapshot, named, atol=1e-6),
        "resumed": list(after[0]) == list(after[1]),
        "rank": info.lora_rank,
    }


def learn(url: str, key: str, file: str, seed: str, supervised: str = "15", steps: str = "80") -> dict:
    rows, chance, client = json.loads(Path(file).read_text()), random.Random(int(seed)), service(url, key)
    held, taught = rows[:128], rows[128:]
    longest = max(len(row["answer"]) for row in rows) + 2
    trained = client.create_lora_training_client(base_model=model_name(url, key), rank=16, seed=int(seed)).result()

    def accuracy() -> float:
        sampler = trained.save_weights_and_get_sampling_client().result()
        asked = [sampler.sample(types.ModelInput.from_ints(row["prompt"]), 1, params(longest, 0.0)) for row in held]
        right = [one.result().sequences[0].tokens == row["answer"] for one, row in zip(asked, held, strict=True)]
        return 100 * sum(right) / len(right)

    before = accuracy()
    for _ in range(int(supervised)):
        trained.forward_backward([datum(**row) for row in chance.sample(taught, 32)], "cross_entropy")
        trained.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    between, mismatch = accuracy(), 0.0
    for step in range(int(steps)):
        sampler = trained.save_weights_and_get_sampling_client().result()
        batch = chance.sample(taught, 32)
        asked = [sampler.sample(types.ModelInput.from_ints(row["prompt"]), 8, params(longest)) for row in batch]
        data = []
        for one, row in zip(asked, batch, strict=True):
            sequences = one.result().sequences
            rewards = np.array([float(each.tokens == row["answer"]) for each in sequences])
            for each, advantage in zip(sequences, rewards - rewards.mean(), strict=True):
                if advantage:
                    many = [float(advantage)] * len(each.tokens)
                    data.append(datum(row["prompt"], list(each.tokens), logprobs=list(each.logprobs), advantages=many))
        if not data:
            continue
        done = trained.forward_backward(data, "importance_sampling")
        trained.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        for one, output in zip(data, done.result().loss_fn_outputs, strict=True):
            mask = np.array(one.loss_fn_inputs["advantages"].data) != 0
            gap = np.array(output["logprobs"].data) - np.array(one.loss_fn_inputs["logprobs"].data)
            mismatch = max(mismatch, float(np.abs(gap[mask]).max()))
        print(f"step {step}: {len(data)} sequences", flush=True)
    after = accuracy()
    client.close("success").result()
    return {"seed": int(seed), "before": before, "between": between, "after": after, "mismatch": mismatch}


def at_once(one: Callable[[int], None], count: str, found: dict[int, Any]) -> list[Any]:
    """Run `one` for all numbers below `count`, each in a thread; what is then `found` by number, or None."""
    threads = [threading.Thread(target=one, args=(number,)) for number in range(int(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(number) for number in range(int(count))]


def tenants(url: str, key: str, count: str) -> dict:
    """Each tenant teaches its model another answer to one prompt; greedy sampling must give its own."""
    name, prompt, found = model_name(url, key), [1, 5, 6, 3], {}

    def one(number: int) -> None:
        client = service(url, key)
        trained = client.create_lora_training_client(base_model=name, rank=4 + number % 3, seed=number).result()
        answer = [4 + number, 12 + number, 2]
        last = None
        for _ in range(60):  # nothing is awaited: the server keeps the order
            trained.forward_backward([datum(prompt, answer)] * 4, "cross_entropy")
            last = trained.optim_step(types.AdamParams(learning_rate=5e-3))
        last.result()
        sampler = trained.save_weights_and_get_sampling_client().result()
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params(3, 0.0)) for _ in range(6)]
        found[number] = [each.result().sequences[0].tokens for each in asked] == [answer] * 6
        client.close("success").result()

    return {"right": at_once(one, count, found)}


def ordered(url: str, key: str, count: str) -> dict:
    """Each tenant trains twelve steps that do not commute, and looks at the model after each; two models, one order."""
    name, prompt, answer, found = model_name(url, key), [1, 5, 6, 3], [4, 5, 6], {}

    def one(number: int) -> None:
        client, chance = service(url, key), random.Random(number)
        rows = [datum(prompt, [chance.randrange(4, 20) for _ in range(3)]) for _ in range(12)]
        rates, seen = [chance.choice((1e-3, 3e-3, 1e-2)) for _ in rows], {}
        for awaited in (False, True):
            model = client.create_lora_training_client(base_model=name, rank=4, seed=number).result()
            looks, saved = [], None
            for step, (row, rate) in enumerate(zip(rows, rates, strict=True)):
                requests = [
                    partial(model.forward_backward, [row], "cross_entropy"),
                    partial(model.optim_step, types.AdamParams(learning_rate=rate)),
                    partial(model.forward, [datum(prompt, answer)], "cross_entropy"),
                    *([partial(model.save_weights_for_sampler, f"half-{awaited}")] if step == 5 else []),
                ]
                sent = []
                for request in requests:
                    sent.append(request())
                    if awaited or len(sent) == 4:  # the SDK numbers a save in its own thread, when it begins it
                        sent[-1].result()
                looks.append(sent[2])
                saved = sent[3] if step == 5 else saved
            half = client.create_sampling_client(model_path=saved.result().path).result()
            logprobs = half.compute_logprobs(types.ModelInput.from_ints(prompt + answer)).result()[len(prompt) :]
            steps = [list(look.result().loss_fn_outputs[0]["logprobs"].data)[-len(answer) :] for look in looks]
            seen[awaited] = {"steps": steps, "saved": logprobs}
        steps = seen[False]["steps"]
        found[number] = {
            "same": seen[False] == seen[True],
            "different": len({tuple(step) for step in steps}),
            "saved": max(abs(a - b) for a, b in zip(seen[False]["saved"], steps[5], strict=True)),
            "later": max(abs(a - b) for a, b in zip(seen[False]["saved"], steps[6], strict=True)),
        }
        client.close("success").result()

    return {"tenants": at_once(one, count, found)}


def outlive(url: str, key: str, file: str) -> dict:
    name, client, given = model_name(url, key), service(url, key), types.ModelInput.from_ints([5, 6, 7])
    trained = client.create_lora_training_client(base_model=name, rank=4, seed=0).result()
    path = trained.save_weights_for_sampler("kept").result().path
    samplers = {
        "base": client.create_sampling_client(base_model=name).result(),
        "named": client.create_sampling_client(model_path=path).result(),
        "snapshot": trained.save_weights_and_get_sampling_client().result(),
    }

    def drawn(kind: str) -> list[int] | str:
        try:
            return samplers[kind].sample(given, 1, params(4, 1.0, 3)).result().sequences[0].tokens
        except tinker.RequestFailedError as error:
            return str(error)

    before = {kind: drawn(kind) for kind in samplers}
    print("ready", flush=True)
    while not Path(file).exists():
        time.sleep(0.05)
    after = {kind: drawn(kind) for kind in samplers}
    samplers["new"] = trained.save_weights_and_get_sampling_client().result()
    found = {kind: after[kind] == before[kind] for kind in ("base", "named")}
    found |= {"snapshot": after["snapshot"], "new": drawn("new") == before["snapshot"]}
    client.close("success").result()
    return found


def stay(url: str, key: str) -> dict:
    client = service(url, key)
    trained = client.create_lora_training_client(base_model=model_name(url, key), rank=4, seed=0).result()
    trained.save_weights_and_get_sampling_client().result()
    print(trained.model_id, flush=True)
    time.sleep(600)
    return {}


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    print(json.dumps(globals()[action](*arguments)))
