"""How calls are drawn: anything, or what one kernel is for. The simple ones come first, towards which hypothesis shrinks."""

import functools

from hypothesis import strategies as st

from tests.fuzz.call import CHOICES, SPECIAL, Call
from tests.fuzz.check import EAGER, REACH

ADD_VALUES = (0.5, 0.0, -0.5, 1.0, -1.0, 0.30884, -2.0, 3.0, 1e-30, -1e-40, 50.0, -50.0, 1e10, -1e38)
SCALES = (2.0, 1.0, 0.0, -1.0, -0.7, 1e-3, 1e-30, 1e-40, 1e30, -1e38)
EXPONENTS = tuple(range(-30, 31, 3))
FINITE = tuple(SPECIAL)[:4]  # and small
WIDTHS = (1, 2, 5, 31, 62, 63, 64, 65, 66, 126, 127, 128, 129, 130)  # about the tensor-core kernel's strips
KINDS = ("any", "hopper", "any", "tiled", "any", "composite")


@functools.cache
def mostly(usual, others, one_in):
    """One of the others once in so many draws."""
    return st.sampled_from((usual,) * ((one_in - 1) * len(others)) + tuple(others))


def rarely(one_in):
    return mostly(False, (True,), one_in)


@st.composite
def layers(draw, kind, device):
    """(kind, geometry, channels) of a ``Call``: what compiles a kernel on CUDA."""
    if kind == "hopper":
        extra = draw(st.tuples(st.integers(0, 1), st.integers(0, 1)))
        geometry = dict(kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), output_padding=extra)
        channels = st.integers(1, 8 if device == "cuda" else 4).map(lambda count: 8 * count)
    else:
        axes = zip(*(draw(axis(4 if kind == "composite" else 7)) for _ in range(2)))
        geometry = dict(zip(("kernel_size", "stride", "padding", "output_padding"), axes))
        channels = st.integers(0, 9).map(lambda half: 2 * half + 1) if kind == "tiled" else st.integers(1, 20)
    if kind == "composite":
        return kind, geometry, (draw(st.integers(64, 300)), draw(st.integers(1, 40)))
    return kind, geometry, (draw(channels), draw(channels))


@functools.cache
def of_any_kind(device, backend):
    return layers(backend, device) if backend == "hopper" else st.one_of([layers(kind, device) for kind in KINDS])


@st.composite
def axis(draw, largest_kernel):
    stride, kernel = draw(st.integers(1, 4)), draw(st.integers(1, largest_kernel))
    return kernel, stride, draw(st.integers(0, kernel)), draw(st.integers(0, stride - 1))


@st.composite
def sizes(draw, kind, geometry, device):
    """(batch, height, width)."""
    on_cuda = device == "cuda"
    if kind == "hopper":
        height = 128 if on_cuda and draw(rarely(20)) else draw(st.integers(1, 6 if on_cuda else 3))
        return draw(st.integers(0, 5 if on_cuda else 2)), height, draw(st.sampled_from(WIDTHS[: None if on_cuda else -3]))
    if kind != "composite" and not on_cuda and draw(rarely(60)):
        return 5, *(128 // stride for stride in geometry["stride"])  # several chunks of images, if channels are many
    found = [draw(st.integers(0, 3))]
    for kernel, stride, padding, extra in zip(*geometry.values()):
        least = max(1, -((kernel + extra - 2 * padding - 1) // stride) + 1)
        found.append(draw(st.integers(least, least + {"any": 6, "tiled": 9, "composite": 4}[kind])))
    return tuple(found)


OPTIONS = {
    "bias": mostly(True, (False,), 3),
    "add_value": st.sampled_from(ADD_VALUES),
    "scale": st.sampled_from(SCALES),
    "dtype": mostly("float32", CHOICES["dtype"][1:], 3),
    "parameters": mostly("", CHOICES["parameters"][1:], 3),
    "autocast": mostly("", CHOICES["autocast"][1:], 3),
    "layout": mostly("contiguous", CHOICES["layout"], 2),
    "weight_layout": mostly("contiguous", CHOICES["weight_layout"], 3),
    "x_exponent": mostly(0, EXPONENTS, 3),
    "weight_exponent": mostly(0, EXPONENTS, 6),
    "x_mix": mostly("even", CHOICES["x_mix"], 6),
    "weight_mix": mostly("even", CHOICES["weight_mix"], 6),
    **{f"{name}_special": mostly("none", tuple(SPECIAL), 6) for name in ("x", "weight", "bias")},
    "precision": st.sampled_from(CHOICES["precision"]),
    "form": st.sampled_from(CHOICES["form"]),
    "gradient": mostly("", CHOICES["gradient"][1:], 4),
    "seed": st.integers(0, 2**31 - 1),
}
OPTIONS = {
    device: st.fixed_dictionaries(
        OPTIONS
        | {"backend": mostly("dispatch", tuple(serving), 3)}
        | {"place": st.sampled_from(CHOICES["place"] if device == "cuda" else ("plain",)), "device": st.just(device)}
    )
    for device, serving in REACH.items()
}


@st.composite
def calls(draw, device, backend=None, pool=None):
    """``pool``: the ``layers`` to choose from, else any; ``backend``: the only one, else any."""
    kind, geometry, channels = draw(of_any_kind(device, backend) if pool is None else st.sampled_from(pool))
    batch, *size = draw(sizes(kind, geometry, device))
    options = draw(OPTIONS[device]) | ({"backend": backend} if backend else {})
    if options["backend"] not in ("dispatch", EAGER) and options["dtype"] == "float64":
        options["dtype"] = "float32"
    if not options["autocast"] or options["dtype"] == "float64":
        options["parameters"] = ""
    options["bias"] |= "b" in options["gradient"]
    # Gradients are compared where nothing overflows: theirs are tamer.
    in_fp16 = "float16" in (options["dtype"], options["parameters"], options["autocast"])
    most = (1 if in_fp16 else 8) if options["gradient"] else 3 if in_fp16 else 30
    if options["x_exponent"] and not options["weight_exponent"] and draw(rarely(2)):
        options["weight_exponent"] = -options["x_exponent"]
    for name, value in options.items():
        if name.endswith("_exponent"):
            options[name] = max(-most, min(most, value))
        if name.endswith("_special") and options["gradient"] and value not in FINITE:
            options[name] = "none"
    return Call((1 if options["form"] == "unbatched" else batch, channels[0], *size), channels[1], **geometry, **options)
