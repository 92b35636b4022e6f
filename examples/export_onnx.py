"""Export a trained network to ONNX, and compare its probabilities in another runtime.

    python examples/train.py
    pip install 'adam-mpi[export]' onnxruntime
    python examples/export_onnx.py runs/example

The file takes pixels and gives probabilities. `adam-mpi export RUN -o FILE.onnx` writes the same file.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

import adam_mpi
from adam_mpi.data import glyphs
from adam_mpi.inference.export import export


def main() -> None:
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
    model = adam_mpi.load(run)
    file = run / "model.onnx"
    print(export(model, file, "onnx"))

    images, _ = glyphs.draw_glyphs(1, "test", np.arange(100))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(["probabilities"], {"input": images})
    print(f"largest difference on {len(images)} images: {np.abs(probabilities - model.predict(images)).max():.1e}")


if __name__ == "__main__":
    main()
