"""A made-up run folder in the formats of docs/run_folder.md, the same every time.

    report_sample.py FOLDER
"""

import json
import math
import pathlib
import random
import sys

RANKS, LAYERS, DIM, STEPS, TRACED = 4, 6, 256, 200, (21, 22, 23)
TOKENS = 32 * 128
MIB = 1 << 20
LAYER_NUMEL, ROOT_NUMEL = 730_368, 131_329
CATEGORIES = ("shards", "gathered", "gradients", "communication", "other")


def group_rows():
    def row(name, numel):
        shard = -(-numel // 2) * 4
        return {"name": name, "numel": numel, "shard_bytes": shard, "gathered_bytes": 2 * shard,
                "padding_bytes": 2 * shard - 4 * numel}
    return [*(row(f"layers.{i}", LAYER_NUMEL) for i in range(LAYERS)), row("", ROOT_NUMEL)]


def metrics(draw):
    shards = sum(group["shard_bytes"] for group in group_rows())
    peak = 0
    for step in range(1, STEPS + 1):
        done = step / STEPS
        seconds = 0.052 * (1.9 if step == 1 else 1) * draw.uniform(0.96, 1.06) * (1.25 if draw.random() < 0.03 else 1)
        memory = dict(shards=shards, gathered=0, gradients=shards, communication=0,
                      other=2 * shards + 3 * MIB)
        peak = max(peak, sum(memory.values()) + draw.randint(20, 22) * MIB)
        yield {
            "step": step,
            "loss": round(1.62 + 3.95 * math.exp(-5.5 * done) + draw.gauss(0, 0.05), 6),
            "grad_norm": round(0.55 + 2.6 * math.exp(-9 * done) + abs(draw.gauss(0, 0.08)), 6),
            "lr": round(2e-3 * (step / 20 if step < 20 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 20) / 180))), 9),
            "tokens": step * TOKENS, "seconds": round(seconds, 6),
            "tokens_per_s": round(TOKENS / seconds, 1),
            "exposed_s": round(seconds * draw.uniform(0.07, 0.12), 6),
            "memory": memory | {"allocated": sum(memory.values()), "peak": peak},
        }
        if step % 40 == 0:
            yield {"step": step, "validation_loss": round(1.74 + 3.7 * math.exp(-5.5 * done), 6),
                   "byte_frequency_loss": 3.2271}


class Rank:
    """Plays the steps of one rank; times are microseconds."""

    def __init__(self, rank, draw):
        self.rank, self.draw, self.now, self.events = rank, draw, 120.0 * rank, []
        self.lanes, self.memory = {}, dict.fromkeys(CATEGORIES, 0)
        self.memory["shards"] = sum(group["shard_bytes"] for group in group_rows())
        self.memory["other"] = 2 * self.memory["shards"] + 3 * MIB
        self.event("M", 0, "process_name", args={"name": f"rank {rank}"})
        for tid, name in ((1, "steps"), (2, "compute"), (3, "waiting")):
            self.event("M", tid, "thread_name", args={"name": name})

    def event(self, ph, tid, name, **more):
        self.events.append({"ph": ph, "pid": self.rank, "tid": tid, "name": name, **more})

    def slice(self, tid, name, cat, begin, end, **args):
        self.event("X", tid, name, cat=cat, ts=round(begin, 3), dur=round(end - begin, 3),
                   **({"args": args} if args else {}))

    def count(self, **change):
        for name, value in change.items():
            self.memory[name] += value
        self.event("C", 0, "memory", ts=round(self.now, 3), args=dict(self.memory))

    def do(self, cat, name, length):
        begin, self.now = self.now, self.now + length * self.draw.uniform(0.93, 1.09)
        self.slice(2, name, cat, begin, self.now)

    def start(self, op, module, size, takes, group):
        return dict(op=op, module=module, size=size, group=group, begin=self.now,
                    ready=self.now + takes * self.draw.uniform(0.9, 1.25))

    def wait(self, work):
        begin, self.now = self.now, max(self.now + 4, work["ready"])
        name = f"{work['op']} {work['module']}".strip()
        self.slice(3, name, "waiting", begin, self.now)
        kind = {"all_gather": 0, "reduce_scatter": 1, "all_reduce": 2}[work["op"]]
        lanes = self.lanes.setdefault(kind, [])
        lane = next((i for i, end in enumerate(lanes) if end <= work["begin"]), len(lanes))
        if lane == len(lanes):
            lanes.append(0)
            title = work["op"].replace("_", "-") + (f" {lane + 1}" if lane else "")
            self.event("M", 10 + 10 * kind + lane, "thread_name", args={"name": title})
        lanes[lane] = self.now
        self.slice(10 + 10 * kind + lane, name, work["op"], work["begin"], self.now,
                   module=work["module"], group=work["group"], bytes=work["size"],
                   waited_us=round(self.now - begin, 3))

    def step(self, number, groups):
        start = self.now
        layer = groups[0]
        names = [group["name"] for group in groups[:-1]]
        gather = lambda g: self.start("all_gather", g["name"], g["gathered_bytes"], 300 + g["gathered_bytes"] / 4500, "shard")
        self.do("other", "other", 350)
        self.count()
        self.wait(gather(groups[-1]))
        self.count(gathered=groups[-1]["gathered_bytes"])
        self.do("forward", "(root)", 500)
        work = gather(groups[0])
        for i, name in enumerate(names):
            self.count(communication=layer["gathered_bytes"])
            self.wait(work)
            self.do("sharding", f"all_gather_copy_out {name}", 210)
            self.count(gathered=layer["gathered_bytes"], communication=-layer["gathered_bytes"])
            work = gather(groups[i + 1]) if i + 1 < LAYERS else None
            self.do("forward", name, 1750)
            self.count(gathered=-layer["gathered_bytes"], other=2 * MIB)
        self.do("forward", "(root)", 1300)
        self.do("backward", "(root)", 1700)
        self.count(other=MIB)
        work, reducing, all_reducing = gather(groups[LAYERS - 1]), [], []
        for i in reversed(range(LAYERS)):
            self.count(communication=layer["gathered_bytes"])
            self.wait(work)
            self.do("sharding", f"all_gather_copy_out {names[i]}", 210)
            self.count(gathered=layer["gathered_bytes"], communication=-layer["gathered_bytes"])
            work = gather(groups[i - 1]) if i else None
            self.do("backward", names[i], 3500)
            self.count(other=-2 * MIB, gradients=layer["gathered_bytes"])
            if reducing:
                self.finish(reducing, all_reducing, layer)
            self.do("sharding", f"post_backward_reduce {names[i]}", 190)
            reducing.append(self.start("reduce_scatter", names[i], layer["gathered_bytes"], 2600, "shard"))
            self.count(gathered=-layer["gathered_bytes"], gradients=-layer["gathered_bytes"],
                       communication=layer["gathered_bytes"])
        self.do("backward", "(root)", 700)
        self.finish(reducing, all_reducing, layer)
        while all_reducing:
            self.wait(all_reducing.pop(0))
        self.count(gathered=-groups[-1]["gathered_bytes"], other=-MIB)
        self.do("optimizer", "clip_grad_norm", 320)
        self.do("optimizer", "optimizer_step", 2100)
        self.count(gradients=-LAYERS * layer["shard_bytes"])
        self.slice(1, f"step {number}", "step", start, self.now, step=number)

    def finish(self, reducing, all_reducing, layer):
        work = reducing.pop()
        self.wait(work)
        self.count(communication=-layer["gathered_bytes"], gradients=layer["shard_bytes"])
        if len(all_reducing) > 1:
            self.wait(all_reducing.pop(0))
        all_reducing.append(self.start("all_reduce", work["module"], layer["shard_bytes"], 2900, "replicate"))


def trace():
    ranks = [Rank(rank, random.Random(100 + rank)) for rank in range(RANKS)]
    for number in TRACED:
        begin = max(rank.now for rank in ranks)
        for rank in ranks:
            rank.now = begin + 90 * rank.draw.random()
            rank.step(number, group_rows())
    events = [event for rank in ranks for event in rank.events]
    return {"displayTimeUnit": "ms", "otherData": {"format": "fsdp trace 1", "ranks": RANKS},
            "traceEvents": events}


CONFIG = {
    "vocab": 256, "dim": DIM, "layers": LAYERS, "heads": 8, "kv-heads": 4, "hidden": 704,
    "context": 128, "batch": 32, "seed": 1, "steps": STEPS, "lr": 2e-3, "clip": 1.0,
    "param-dtype": "fp32", "betas": [0.9, 0.95], "data": "/text",
    "mesh": "dp=2,shard=2", "reshard-after-forward": "auto",
}


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    lines = metrics(random.Random(7))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "groups.json").write_text(json.dumps(group_rows(), indent=1) + "\n")
    (folder / "trace.json").write_text(json.dumps(trace()) + "\n")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
