"""The kernels of steps of states."""

from __future__ import annotations

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.layouts import FLOATS
from prefixkit.cuda.nvrtc import Unit

CONV_WIDTHS = (2, 3, 4)
STATE_SIZES = (16, 32, 64, 128, 256)  # elements of a row of a head's state, in Mamba 2
KEY_SIZES = (32, 64, 128, 256)  # elements of a key under the delta rule; shorter ones are padded


def conv_name(dtype: str, width: int) -> str:
    """The kernel of one token through a causal convolution."""
    return f"prefixkit::conv_step<{FLOATS[dtype]}, {width}>"


def mamba2_name(dtype: str, state_size: int) -> str:
    """The kernel of one token through Mamba 2's recurrence."""
    return f"prefixkit::mamba2_step<{FLOATS[dtype]}, {state_size}>"


def delta_name(dtype: str, key_size: int) -> str:
    """The kernel of the gated delta rule."""
    return f"prefixkit::delta_rule<{FLOATS[dtype]}, {key_size}>"


def norm_name(dtype: str, lanes: int) -> str:
    """The kernel of norms by the root mean square."""
    return f"prefixkit::rms_norm<{FLOATS[dtype]}, {lanes}>"


CONV_STEP = Unit(
    "states/conv_step.cu",
    tuple(conv_name(dtype, width) for dtype in FLOATS for width in CONV_WIDTHS),
    headers=(layouts.CONV_STEP.header,),
)

NORM_LANES = (32, 256)  # threads of a row
RMS_NORM = Unit(
    "states/rms_norm.cu",
    tuple(norm_name(dtype, lanes) for dtype in FLOATS for lanes in NORM_LANES),
    headers=(layouts.RMS_NORM.header,),
)


def mamba2_unit(state_size: int) -> Unit:
    """The kernels of Mamba 2's recurrence for a state size, in all dtypes."""
    names = tuple(mamba2_name(dtype, state_size) for dtype in FLOATS)
    return Unit("states/mamba2_step.cu", names, headers=(layouts.MAMBA2_STEP.header,))


def delta_unit(key_size: int) -> Unit:
    """The kernels of the gated delta rule for a size of keys, in all dtypes."""
    names = tuple(delta_name(dtype, key_size) for dtype in FLOATS)
    return Unit("states/delta_rule.cu", names, headers=(layouts.DELTA_RULE.header,))
