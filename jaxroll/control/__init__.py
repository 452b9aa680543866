"""From a config to running processes: program, supervisor, launchers, command line. Never imports JAX.

Here: the commands of `jaxroll` by group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command: its name, its help text and one example."""

    name: str
    text: str
    example: str


GROUPS: dict[str, tuple[Command, ...]] = {
    "run": (
        Command("demo", "train a small model by asynchronous RL on the CPU", "jaxroll demo"),
        Command("train", "start all roles of a run on this machine and supervise them",
                "jaxroll train --config=configs/rlvr_tiny.py"),
        Command("sft", "supervised warm start on worked answers", "jaxroll sft --config=configs/sft_spell.py"),
        Command("sim", "simulate a run on a described cluster, or measure the costs of a cluster in a run",
                "jaxroll sim --config=configs/demo.py --cluster=cluster.toml --sweep=schedule.alpha=0,1,2"),
        Command("plan", "compile a config for described hardware: does it fit, and how fast can it be",
                "jaxroll plan --config=configs/rlvr_qwen3_8b.py --topology=v5p:4x4x4"),
        Command("place", "choose placement and schedule for a cluster", "jaxroll place --cluster=cluster.toml"),
        Command("init", "write a first config for a model, a task and hardware",
                "jaxroll init mine.py --model=models/Qwen3-0.6B --task=data/train.jsonl --hardware=gpu:8"),
        Command("config", "check a config and print it with all defaults", "jaxroll config --config=configs/demo.py"),
    ),
    "inspect": (
        Command("list", "list the runs in a folder", "jaxroll list runs"),
        Command("ui", "show the runs in a folder in the browser, live, and control them", "jaxroll ui runs"),
        Command("report", "print the summary of a run and write its page report.html", "jaxroll report runs/demo"),
        Command("inspect", "show leases, waits and failures of a run, or one trajectory group in full",
                "jaxroll inspect runs/demo --group=7"),
        Command("checkpoints", "list the checkpoints of a run: step, lineage, size, time, log position, durability",
                "jaxroll checkpoints runs/demo --verify"),
        Command("profile", "record a trace of the next steps of one role, with the shares of host and device",
                "jaxroll profile runs/demo --role=sampler-0"),
        Command("export", "write the trajectories that a run keeps, or its timeline",
                "jaxroll export runs/demo --jsonl=trajectories.jsonl"),
        Command("replay", "replay the log of a run through the store's rules and check every record",
                "jaxroll replay runs/demo"),
    ),
    "models": (
        Command("generate", "answer prompts with the newest weights of a run",
                "jaxroll generate runs/demo stone water --temperature=0.7"),
        Command("eval", "held-out accuracy of the newest weights of a run", "jaxroll eval runs/demo"),
        Command("serve", "serve the newest weights of a run, or a Hugging Face folder, behind OpenAI's HTTP interface",
                "jaxroll serve runs/demo --port=8000"),
        Command("tinker-serve", "train and sample for clients of the Tinker API",
                "jaxroll tinker-serve models/Qwen3-0.6B --port=8200"),
        Command("weights", "import a model from Hugging Face, or export one",
                "jaxroll weights export runs/demo exported"),
    ),
    "roles": (
        Command("store", "run the store alone", "jaxroll store runs/a --store=127.0.0.1:7077"),
        Command("learner", "run the learner alone", "jaxroll learner runs/a --store=127.0.0.1:7077"),
        Command("sampler", "run one sampler alone, or one more for a running run",
                "jaxroll sampler --join=store.example:7077"),
        Command("actor", "run one actor alone: it plays episodes and calls the samplers' engines",
                "jaxroll actor runs/a --store=127.0.0.1:7077 --index=0"),
        Command("evaluator", "run the evaluator alone", "jaxroll evaluator runs/a --store=127.0.0.1:7077"),
        Command("colocated", "run learner, samplers and evaluator in one process",
                "jaxroll colocated runs/a --store=127.0.0.1:7077"),
        Command("feeder", "run the prompt feeder, which the store starts as its child", "jaxroll feeder runs/a"),
    ),
    "setup": (
        Command("doctor", "list installed and missing dependencies, with the command that installs each",
                "jaxroll doctor"),
        Command("compile", "compile the programs of one role into the compilation cache",
                "jaxroll compile runs/a --role=sampler"),
        Command("env", "check an environment of your own before a run depends on it, or serve it to clients of OpenEnv",
                "jaxroll env check my_module:MyEnv"),
        Command("tls", "make certificates in RUN/tls for a run on several machines, or print the token of one role",
                "jaxroll tls runs/a --host=learner.example"),
        Command("launch", "start the roles with a launcher: ssh, Ray, Slurm, JobSet, SkyPilot, TPU VMs",
                "jaxroll launch --on=slurm --config=configs/smoke.py --scratch=/local/x --dry-run"),
    ),
}  # fmt: skip
