"""How cases are drawn out of integers: anything, or of a few layers, each of which compiles a kernel on CUDA."""

from numba_impl.fuzz.case import CHOICES, GRADIENTS, SPECIAL, Case

SERVING = {"cpu": ("cpu", "reference"), "cuda": ("hopper", "tiled", "composite", "reference")}
ADD_VALUES = (0.5, 0.0, -0.5, 1.0, -1.0, 0.30884, -2.0, 3.0, 1e-30, -1e-40, 50.0, -50.0, 1e10, -1e38)
SCALES = (2.0, 1.0, 0.0, -1.0, -0.7, 1e-3, 1e-30, 1e-40, 1e30, -1e38)
FINITE = SPECIAL[:4]  # and small
# What each kernel is for, and half the time anything.
KINDS = ("any", "hopper", "any", "tiled", "any", "composite")


class Draw:
    """Choices out of one source of integers: ``integers(least, most)``. The simple ones come first, towards which is shrunk."""

    def __init__(self, integers):
        self.integers = integers

    def pick(self, options):
        return options[self.integers(0, len(options) - 1)]

    def rarely(self, one_in):
        return self.integers(0, one_in - 1) == one_in - 1


def draw_layer(draw: Draw, kind, device):
    """Geometry and channels, as of a case; what compiles a kernel."""
    if kind == "hopper":
        most = 8 if device == "cuda" else 4
        extra = draw.integers(0, 1), draw.integers(0, 1)
        channels = 8 * draw.integers(1, most), 8 * draw.integers(1, most)
        return dict(kernel=(3, 3), stride=(2, 2), padding=(1, 1), extra=extra), *channels
    axes = [_draw_axis(draw, 4 if kind == "composite" else 7) for _ in range(2)]
    geometry = dict(zip(("kernel", "stride", "padding", "extra"), zip(*axes)))
    if kind == "composite":
        return geometry, draw.integers(64, 300), draw.integers(1, 40)
    if kind == "tiled":
        return geometry, 2 * draw.integers(0, 9) + 1, 2 * draw.integers(0, 9) + 1
    return geometry, draw.integers(1, 20), draw.integers(1, 20)


def _draw_axis(draw, largest_kernel):
    stride, kernel = draw.integers(1, 4), draw.integers(1, largest_kernel)
    return kernel, stride, draw.integers(0, kernel), draw.integers(0, stride - 1)


def draw_size(draw: Draw, kind, geometry, device):
    """(batch, height, width)."""
    if kind == "hopper":
        on_cuda = device == "cuda"
        width = draw.pick((1, 2, 5, 31, 62, 63, 64, 65, 66, *(126, 127, 128, 129, 130)[: None if on_cuda else 3]))
        batch = draw.integers(0, 5 if on_cuda else 2)
        return batch, 128 if on_cuda and draw.rarely(20) else draw.integers(1, 6 if on_cuda else 3), width
    sizes = []
    for axis in zip(*(geometry[name] for name in ("kernel", "stride", "padding", "extra"))):
        kernel, stride, padding, extra = axis
        least = max(1, -((kernel + extra - 2 * padding - 1) // stride) + 1)
        sizes.append(draw.integers(least, least + {"any": 6, "tiled": 9, "composite": 4}[kind]))
    if kind != "composite" and draw.rarely(60) and device == "cpu":
        return 5, 128 // geometry["stride"][0], 128 // geometry["stride"][1]  # several chunks of images, if channels are many
    return draw.integers(0, 3), *sizes


def draw_case(draw: Draw, device, backend, layers=None) -> Case:
    """``layers``: the (kind, layer) to choose from, else any; ``backend``: the only one, else any."""
    if layers is None:
        kind = draw.pick(KINDS) if backend != "hopper" else "hopper"
        geometry, in_channels, out = draw_layer(draw, kind, device)
    else:
        kind, (geometry, in_channels, out) = draw.pick(layers)
    batch, height, width = draw_size(draw, kind, geometry, device)
    names = SERVING[device] if kind == "hopper" or draw.rarely(10) else SERVING[device][device == "cuda" :]
    forced = backend or draw.pick(("dispatch", *names) if draw.rarely(2) else ("dispatch",))
    others = draw.rarely(6) and forced in ("dispatch", "reference")
    dtype = draw.pick(CHOICES["dtype"][1:]) if others else "float32"
    bias = not draw.rarely(3)
    options = {} if dtype in ("float16", "bfloat16") else _draw_gradient(draw, bias)
    form = draw.pick(CHOICES["form"])
    return Case(
        **geometry | options | _draw_values(draw, dtype, "gradient" in options),
        x=(1 if form == "unbatched" else batch, in_channels, height, width),
        out=out,
        bias=bias,
        add=draw.pick(ADD_VALUES),
        scale=draw.pick(SCALES),
        dtype=dtype,
        layout=draw.pick(CHOICES["layout"]) if draw.rarely(2) else "contiguous",
        weight_layout=draw.pick(CHOICES["weight_layout"]) if draw.rarely(3) else "contiguous",
        precision=draw.pick(CHOICES["precision"]),
        backend=forced,
        form=form,
        place=draw.pick(CHOICES["place"]) if device == "cuda" else "plain",
        device=device,
        seed=draw.integers(0, 2**31 - 1),
    )


def _draw_gradient(draw, bias):
    if not draw.rarely(4):
        return {}
    return {"gradient": draw.pick([letters for letters in GRADIENTS[1:] if bias or "b" not in letters])}


def _draw_values(draw, dtype, differentiated):
    """Scales and special values of the operands. Gradients are compared where nothing overflows, so theirs are tamer."""
    most = 3 if dtype == "float16" else 8 if differentiated else 30
    values = {}
    if draw.rarely(3):
        x = draw.integers(-most, most)
        opposite = max(-most, min(most, -x + draw.integers(-2, 2)))
        values["x_exponent"] = x
        values["weight_exponent"] = draw.integers(-most, most) if draw.rarely(2) else opposite
    for name in ("x_mix", "weight_mix"):
        if draw.rarely(6):
            values[name] = draw.pick(CHOICES[name])
    for name in ("x_special", "weight_special", "bias_special"):
        if draw.rarely(6):
            values[name] = draw.pick(FINITE if differentiated else SPECIAL)
    return values
