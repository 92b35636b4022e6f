"""One training node: images per second of the engine, against PyTorch on the same core, and of two threads."""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
from _models import MODELS, Model, in_torch
from _timing import Times, interleaved

from adam_mpi.model import parameters
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.model.network import Network
from adam_mpi.worker.gradient_buffer import add_scaled
from adam_mpi.worker.thread_weights import ROUND, ThreadWeights

RATE = np.float32(1e-4)
STEPS, SMALL_RATE = 100, 0.0005
"""Of the comparison of losses."""
TURN = 3.0
"""Seconds of a turn of the comparison of threads."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", choices=["torch"], help="compare with PyTorch, which has to be installed")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=["eager", "channels_last", "compile"], help="of PyTorch")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each comparison")
    parser.add_argument("--engine", default="generated", choices=["generated", "reference"])


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    for name in arguments.models:
        model = MODELS[name]
        for batch, target in model.batches.items():
            yield from compare(name, model, batch, target, arguments)
        if arguments.against and name == "mnist":
            yield from accuracy(name, model, arguments.engine)
        yield scaling(name, model, max(model.batches), arguments)
        yield from inputs(name, model, max(model.batches), arguments)


def compare(name: str, model: Model, batch: int, target: float, arguments: argparse.Namespace) -> Iterator[dict]:
    """The engine, a matrix product to tell what the core can do, and PyTorch in its modes."""
    contenders: dict[str, Callable[[], object]] = {"engine": engine_step(model, batch, arguments.engine)}
    matrix = np.random.default_rng(0).random((1024, 1024), dtype=np.float32)
    contenders["sgemm"] = lambda: matrix @ matrix
    contenders |= torch_steps(model, batch, arguments.modes) if arguments.against else {}
    times = interleaved(contenders, arguments.seconds)
    engine, peak = times["engine"], 2 * 1024**3 / times["sgemm"].cpu
    label = f"{name}_batch{batch}"
    yield line(f"{label}_images", batch / engine.cpu, "images/s", None, engine)
    fraction = model.flops * batch / engine.cpu / peak
    yield line(f"{label}_of_sgemm", fraction, "of sgemm", 0.65 if (name, batch) == ("mnist", 64) else None, engine)
    others = {mode: times[mode] for mode in times if mode not in ("engine", "sgemm")}
    for mode, other in others.items():
        yield line(f"{label}_vs_torch_{mode}", other.cpu / engine.cpu, "x", None, other)
    if others:
        best = min(others.values(), key=lambda times: times.cpu)
        yield line(f"{label}_vs_torch", best.cpu / engine.cpu, "x", target, best) | {
            "wall_value": round(min(other.wall for other in others.values()) / engine.wall, 3)
        }


def inputs(name: str, model: Model, batch: int, arguments: argparse.Namespace) -> Iterator[dict]:
    """Speed from normalized bytes and from floats, as a fraction of that from bytes."""
    channels = model.shapes[0].input[0]
    normalized = InputFormat(mean=(127.0,) * channels, factor=(1 / 64,) * channels)
    forms = {"bytes": SCALED_BYTES, "normalized": normalized, "floats": InputFormat("float32")}
    times = interleaved(
        {form: engine_step(model, batch, arguments.engine, forms[form]) for form in forms}, arguments.seconds
    )
    for form in ("normalized", "floats"):
        value = times["bytes"].cpu / times[form].cpu
        yield line(f"{name}_batch{batch}_{form}_of_bytes", value, "of bytes", 0.95, times[form])


def line(name: str, value: float, unit: str, target: float | None, times: Times) -> dict:
    shown = {"cpu_ms": round(1e3 * times.cpu, 3), "wall_ms": round(1e3 * times.wall, 3)}
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, **shown}


def data(model: Model, batch: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, labels and ids."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (batch, *model.shapes[0].input), dtype=np.uint8)
    return pixels, random.integers(0, model.shapes[-1].output[0], batch), np.arange(batch)


def engine_step(model: Model, batch: int, engine: str, form: InputFormat = SCALED_BYTES) -> Callable[[], object]:
    context = Network(model.shapes, batch, 0, engine=engine, form=form).context()
    weights = parameters.initial(model.shapes, 0)
    gradient = np.zeros_like(weights)
    pixels, labels, ids = data(model, batch)
    # Scaled, so that no step diverges.
    images = pixels if form.bytes else pixels / np.float32(255)

    def step() -> None:
        context.train(weights, gradient, images, labels, ids=ids, epoch=0, overwrite=True)
        add_scaled(weights, gradient, -RATE)

    return step


def torch_steps(model: Model, batch: int, modes: list[str]) -> dict[str, Callable[[], object]]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = {}
    for mode in modes:
        step = torch_step(torch, model, batch, mode)
        try:
            step()
        except Exception as error:  # torch.compile needs a C++ compiler, and does not work everywhere
            print(f"torch {mode} does not work here: {str(error).splitlines()[0]}", file=sys.stderr)
        else:
            steps[mode] = step
    return steps


def torch_step(torch: Any, model: Model, batch: int, mode: str) -> Callable[[], object]:
    module = in_torch(model.shapes)
    pixels, labels, _ = data(model, batch)
    inputs, targets = torch.from_numpy(pixels / np.float32(255)), torch.from_numpy(labels)
    if mode == "channels_last":
        module = module.to(memory_format=torch.channels_last)
        inputs = inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), lr=float(RATE))
    called, loss = torch.compile(module) if mode == "compile" else module, torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(called(inputs), targets).backward()
        optimizer.step()

    return step


def accuracy(name: str, model: Model, engine: str) -> Iterator[dict]:
    """Digits in which losses agree after 100 steps from equal weights, the fewest of five runs: of the engine and
    PyTorch, and for comparison of PyTorch in single and in double precision.

    The steps are small: with large ones any two orders of summation part ways at the first near-tie of a max-pooling.
    """
    import torch

    pairs: dict[str, list] = {"accuracy": [], "accuracy_of_torch": []}
    for seed in range(5):
        weights, block = parameters.initial(model.shapes, seed), data(model, 16, seed)
        single, double = (torch_loss(torch, model, weights, block, dtype) for dtype in (torch.float32, torch.float64))
        pairs["accuracy"].append((engine_loss(model, weights, block, engine), single))
        pairs["accuracy_of_torch"].append((single, double))
    for label, losses in pairs.items():
        difference = max(abs(one - other) / other for one, other in losses)
        shown = {"value": round(-np.log10(max(difference, 1e-9)), 2), "unit": "digits"}
        yield {"name": f"{name}_{label}", **shown, "target": 4.0 if label == "accuracy" else None}


def engine_loss(model: Model, start: np.ndarray, block: tuple, engine: str) -> float:
    batch, weights, gradient = len(block[0]), start.copy(), np.zeros_like(start)
    context = Network(model.shapes, batch, 0, engine=engine).context()
    for _ in range(STEPS):
        loss, _ = context.train(weights, gradient, *block, 0, True)
        add_scaled(weights, gradient, np.float32(-SMALL_RATE / batch))
    return loss / batch


def torch_loss(torch: Any, model: Model, weights: np.ndarray, block: tuple, dtype: Any) -> float:
    module, (pixels, labels, _) = in_torch(model.shapes).to(dtype), block
    with torch.no_grad():
        for tensor, values in zip(parameters.tensors(model.shapes), module.parameters(), strict=True):
            values.copy_(torch.from_numpy(weights[tensor.offset : tensor.offset + tensor.size].reshape(tensor.shape)))
    optimizer, function = torch.optim.SGD(module.parameters(), lr=SMALL_RATE), torch.nn.CrossEntropyLoss()
    inputs, targets = torch.from_numpy(pixels / np.float32(255)).to(dtype), torch.from_numpy(labels)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = function(module(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def scaling(name: str, model: Model, batch: int, arguments: argparse.Namespace) -> dict:
    """Wall time of two threads against one, both as trainer threads work: on copies, added to the shared weights.

    Turns are long, because a turn ends with the slower thread and training does not end every second.
    `cpu_value` is the same in thread CPU time: what is lost to shared memory, without what others on the machine take.
    """
    run = crew(model, batch, 2, arguments.engine)
    once = min(run(1, ROUND).wall for _ in range(3)) / ROUND
    steps = max(1, round(TURN / once) // ROUND) * ROUND
    rounds = [(run(1, steps), run(2, steps)) for _ in range(max(5, int(arguments.seconds / (2 * steps * once))))]
    value, shown = median(2 * one.wall / two.wall for one, two in rounds), rounds[0][1]
    return line(f"{name}_batch{batch}_threads2", value, "x", 1.85, shown) | {
        "cpu_value": round(median(2 * one.cpu / two.cpu for one, two in rounds), 3)
    }


def crew(model: Model, batch: int, most: int, engine: str = "generated") -> Callable[[int, int], Times]:
    """run(threads, steps): so many threads, up to `most`, take so many batches each, as trainer threads do."""
    network = Network(model.shapes, batch, 0, engine=engine, batches=ROUND)
    shared, block = parameters.initial(model.shapes, 0), data(model, batch)
    copies = [ThreadWeights(network, shared, index, alone=False) for index in range(most)]
    totals, cpu = [np.zeros_like(shared) for _ in range(most)], [0.0] * most

    def work(index: int, steps: int) -> None:
        copy, start = copies[index], time.thread_time()
        for _ in range(steps):
            copy.context.train(copy.weights, copy.gradient, *block, 0, copy.begin(), **copy.options)
            copy.step(totals[index], float(-RATE), 1.0)
        cpu[index] = time.thread_time() - start

    def run(threads: int, steps: int) -> Times:
        workers = [threading.Thread(target=work, args=(index, steps)) for index in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return Times(sum(cpu[:threads]) / threads, time.perf_counter() - start)

    return run
