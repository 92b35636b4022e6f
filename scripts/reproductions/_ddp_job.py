"""PyTorch DDP on MNIST: processes with gloo, one thread each; run by `reproduce ddp`, prints JSON.

    python _ddp_job.py PROCESSES BATCH RATE MOMENTUM AVERAGE TARGET EPOCHS SEED MODE

BATCH is that of all processes together, AVERAGE the share of each step in the running average of the weights, which is
evaluated; MODE is eager or compile, both channels-last. Ends when the validation accuracy reaches TARGET. Time counts
from the first batch: loading, meeting and compiling are told apart.
"""

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "benches"))

EVALUATED = 500
"""Images at a time in an evaluation."""


@dataclass(frozen=True)
class Task:
    processes: int
    batch: int
    rate: float
    momentum: float
    average: float
    target: float
    epochs: int
    seed: int
    mode: str
    port: int
    began: float


def main() -> None:
    from torch import multiprocessing

    kinds = (int, int, float, float, float, float, int, int, str)
    given = [kind(word) for kind, word in zip(kinds, sys.argv[1:], strict=True)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    task = Task(*given, port, time.time())
    multiprocessing.spawn(process, (task,), nprocs=task.processes)


def process(rank: int, task: Task) -> None:
    import torch
    from torch import distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task.port)}
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)
    distributed.init_process_group("gloo", rank=rank, world_size=task.processes)
    result = train(rank, task)
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(result | {"torch": torch.__version__}), flush=True)


def train(rank: int, task: Task) -> dict[str, Any]:
    import torch
    from _models import MODELS, in_torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    module = in_torch(MODELS["mnist"].shapes).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(module)
    called = torch.compile(model) if task.mode == "compile" else model
    optimiser = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=task.momentum)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(1 - task.average))
    loss, parts = torch.nn.CrossEntropyLoss(), images()
    own = task.batch // task.processes

    def step(pixels: Any, labels: Any) -> None:
        optimiser.zero_grad(set_to_none=True)
        loss(called(pixels), labels).backward()
        optimiser.step()

    start_up, begun = time.time() - task.began, time.perf_counter()
    warm_up(step, model, optimiser, own)
    compiled, curve, begun = time.perf_counter() - begun, [], time.perf_counter()
    for epoch in range(task.epochs):
        trained = time.perf_counter()
        order = np.random.default_rng([task.seed, epoch]).permutation(len(parts["train"][1]))
        for first in range(0, len(order) - task.batch + 1, task.batch):
            chosen = order[first + rank * own : first + (rank + 1) * own]
            step(*batch(parts["train"], chosen))
            average.update_parameters(module)
        trained = time.perf_counter() - trained
        accuracy = evaluate(average, parts["validation"], rank, task.processes)
        rate = len(order) // task.batch * task.batch / trained
        curve.append([round(time.perf_counter() - begun, 3), accuracy, rate])
        if accuracy >= task.target:
            break
    return {"start_up": start_up, "compile": compiled, "curve": curve}


def warm_up(step: Any, model: Any, optimiser: Any, count: int) -> None:
    """What compiles or tunes itself at first use does so now; weights are as before, and the optimiser has no past."""
    import torch

    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        step(torch.zeros(count, 1, 28, 28).to(memory_format=torch.channels_last), torch.zeros(count, dtype=torch.int64))
    model.load_state_dict(before)
    optimiser.state.clear()


def images() -> dict[str, tuple[Any, Any]]:
    """The parts that adam_mpi trains and validates with, in memory as PyTorch likes them."""
    import torch

    from adam_mpi import config
    from adam_mpi.data.sets import open_set

    data = open_set(config.load(None, ["data.set=mnist"]).data)
    parts = {}
    for part in ("train", "validation"):
        pixels, labels = data.read(part, np.arange(getattr(data.description, part)))
        floats = torch.from_numpy(pixels).float().div_(255).to(memory_format=torch.channels_last)
        parts[part] = floats, torch.from_numpy(labels.astype(np.int64))
    return parts


def batch(part: tuple[Any, Any], chosen: np.ndarray) -> tuple[Any, Any]:
    import torch

    indices = torch.from_numpy(chosen)
    return part[0][indices], part[1][indices]


def evaluate(module: Any, part: tuple[Any, Any], rank: int, processes: int) -> float:
    """Each process takes its share."""
    import torch
    from torch import distributed

    share = np.array_split(np.arange(len(part[1])), processes)[rank]
    correct = torch.zeros(1)
    with torch.no_grad():
        for first in range(0, len(share), EVALUATED):
            pixels, labels = batch(part, share[first : first + EVALUATED])
            correct += (module(pixels).argmax(1) == labels).sum()
    distributed.all_reduce(correct)
    return float(correct) / len(part[1])


if __name__ == "__main__":
    main()
