"""PyTorch DDP on MNIST: processes with gloo, one thread each; run by `reproduce ddp`, prints JSON.

    python _ddp_job.py PROCESSES BATCH RATE MOMENTUM AVERAGE FIRST TARGET EPOCHS SEED MODE

BATCH is that of all processes together, AVERAGE the share of each step in the running average of the weights, which is
evaluated; FIRST whose rule draws the first weights; MODE is eager or compile, both channels-last. Ends when the
validation accuracy reaches TARGET. Time counts from the first batch: loading, meeting and compiling are told apart.
Every process distorts its images of an epoch before it, by adam_mpi's code: that is counted, and told apart too.
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
    first: str
    target: float
    epochs: int
    seed: int
    mode: str
    port: int
    began: float


def main() -> None:
    from torch import multiprocessing

    kinds = (int, int, float, float, float, str, float, int, int, str)
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
    distributed.init_process_group("gloo", rank=rank, world_size=task.processes)
    result = train(rank, task)
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(result | {"torch": torch.__version__}), flush=True)


def train(rank: int, task: Task) -> dict[str, Any]:
    import _first
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    module = _first.module(task.first, task.seed).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(module)
    called = torch.compile(model) if task.mode == "compile" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=task.momentum)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(1 - task.average))
    loss, parts = torch.nn.CrossEntropyLoss(), Images.open(task.seed)
    own = task.batch // task.processes

    def step(pixels: Any, labels: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(called(pixels), labels).backward()
        optimizer.step()

    start_up, begun = time.time() - task.began, time.perf_counter()
    warm_up(step, model, optimizer, own)
    compiled, curve, distorting = time.perf_counter() - begun, [], 0.0
    started = time.perf_counter()
    for epoch in range(task.epochs):
        order = np.random.default_rng([task.seed, epoch]).permutation(parts.data.description.train)
        whole = order[: len(order) // task.batch * task.batch]
        begun = time.perf_counter()
        pixels, labels = parts.distorted(whole.reshape(-1, task.processes, own)[:, rank].ravel(), epoch)
        distorting, begun = distorting + time.perf_counter() - begun, time.perf_counter()
        for first in range(0, len(labels), own):
            step(pixels[first : first + own], labels[first : first + own])
            average.update_parameters(module)
        trained = time.perf_counter() - begun
        accuracy = evaluate(average, parts.validation, rank, task.processes)
        curve.append([round(time.perf_counter() - started, 3), accuracy, len(whole) / trained])
        if accuracy >= task.target:
            break
    return {"start_up": start_up, "compile": compiled, "curve": curve, "distorting": distorting}


def warm_up(step: Any, model: Any, optimizer: Any, count: int) -> None:
    """What compiles or tunes itself at first use does so now; weights are as before, and the optimizer has no past."""
    import torch

    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        step(torch.zeros(count, 1, 28, 28).to(memory_format=torch.channels_last), torch.zeros(count, dtype=torch.int64))
    model.load_state_dict(before)
    optimizer.state.clear()


@dataclass(frozen=True)
class Images:
    """What adam_mpi trains and validates with, as PyTorch likes it."""

    data: Any
    transformer: Any
    validation: tuple[Any, Any]

    @classmethod
    def open(cls, seed: int) -> "Images":
        import _recipes

        from adam_mpi import config
        from adam_mpi.data.sets import open_set
        from adam_mpi.data.transform import Transformer

        wanted = _recipes.TOLD["sets"]["mnist"]["data"]["transform"]
        settings = ["data.set=mnist", *(f"data.transform.{name}={value}" for name, value in wanted.items())]
        data = open_set(config.load(None, settings).data)
        source = data.sources["train"]
        transformer = Transformer(data.data.transform, source.shape, source.dtype, seed, np.empty(0))
        pixels, labels = data.read("validation", np.arange(data.description.validation))
        return cls(data, transformer, in_torch_layout(pixels, labels))

    def distorted(self, chosen: np.ndarray, epoch: int) -> tuple[Any, Any]:
        """Training images in this order, bent anew for each epoch."""
        pixels, labels = self.data.read("train", chosen)
        return in_torch_layout(self.transformer(pixels, chosen, epoch), labels)


def in_torch_layout(pixels: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    import torch

    floats = torch.from_numpy(pixels).float().div_(255).to(memory_format=torch.channels_last)
    return floats, torch.from_numpy(labels.astype(np.int64))


def evaluate(module: Any, part: tuple[Any, Any], rank: int, processes: int) -> float:
    """Each process takes its share."""
    import torch
    from torch import distributed

    share = np.array_split(np.arange(len(part[1])), processes)[rank]
    correct = torch.zeros(1)
    with torch.no_grad():
        for first in range(0, len(share), EVALUATED):
            chosen = torch.from_numpy(share[first : first + EVALUATED])
            correct += (module(part[0][chosen]).argmax(1) == part[1][chosen]).sum()
    distributed.all_reduce(correct)
    return float(correct) / len(part[1])


if __name__ == "__main__":
    main()
