"""Operators: each file has everything about one operator, or about a tight family of them.

`operator.py` has the rules that an operator may have. Importing this package registers all operators of the product.
"""

from adam_mpi.model.ops import (  # noqa: F401
    activation,
    attention,
    batch_norm,
    conv,
    conv_transpose,
    cross_entropy,
    dense,
    dropout,
    embedding,
    gather,
    layer_norm,
    local_response_norm,
    losses,
    matmul,
    pool,
    recurrent,
    reduce,
    shape,
    soft_cross_entropy,
    softmax,
    split,
    upsample,
)
