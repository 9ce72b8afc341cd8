"""Random calls of the op as lines of text: drawn, made into tensors, made smaller."""

from dataclasses import dataclass, fields, replace

import torch

from tests.numeric.law import Inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MASKS = {
    "none": None,
    "normal": None,
    "inf": -torch.inf,  # a share of the keys
    "1e9": -1e9,
    "rows": -1e9,  # whole rows n, and a share of the keys of the others
    "rows-inf": -torch.inf,
    "one-key": -torch.inf,  # all but one
    "padded": -torch.inf,  # the last ones
    "bool": None,  # a mask of booleans, a third of them False
}
LAYOUTS = ("contiguous", "heads-first", "strided", "expanded")
MOST_SCORES = 4e7  # of a large call: 0.3 GB in float64, as are
MOST_ELEMENTS = 4e7  # of its Q, K and V together, with heads of 128 channels


@dataclass(frozen=True)
class Call:
    """The properties of a call; the first of several choices is the simplest."""

    seed: int
    dtype: str = "fp32"
    B: int = 1
    N: int = 1
    Lq: int = 1
    Lk: int = 1
    H: int = 1
    D: int = 1
    Dv: int = 1
    spread: float = 1.0  # standard deviation of the scores, about
    bias1: str = "none"  # one of MASKS
    bias1_dtype: str = "same"
    bias1_full: bool = True  # or one row for all b and n
    bias2: str = "none"
    bias2_dtype: str = "same"
    bias2_full: bool = True  # or the same for all b
    layout: str = "contiguous"  # one of LAYOUTS
    do: str = "contiguous"  # one of LAYOUTS
    row_mask: bool = False
    scale: float = 1.0  # of the default one
    needs: str = "11111"  # q, k, v, bias1, bias2

    def __str__(self):
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @classmethod
    def parse(cls, line):
        kinds = {"int": int, "float": float, "str": str, "bool": lambda text: text == "True"}
        types = {field.name: kinds[field.type.__name__] for field in fields(cls)}
        pairs = (word.split("=", 1) for word in line.split())
        return cls(**{name: types[name](value) for name, value in pairs})

    def inputs(self, device="cpu"):
        return _Maker(self, device).inputs()


class _Maker:
    def __init__(self, call, device):
        self.call = call
        self.dtype = DTYPES[call.dtype]
        self.device = device
        self.generator = torch.Generator(device).manual_seed(call.seed)

    def inputs(self):
        c = self.call
        q = self._tensor(c.Lq, c.D, c.layout, c.spread)
        k, v = self._tensor(c.Lk, c.D, c.layout), self._tensor(c.Lk, c.Dv, c.layout)
        lead = (c.B, c.N) if c.bias1_full else (1, 1)
        bias1 = self._bias(c.bias1, c.bias1_dtype, (*lead, 1, 1, c.Lk))
        B = c.B if c.bias2_full else 1
        bias2 = self._bias(c.bias2, c.bias2_dtype, (B, 1, c.H, c.Lq, c.Lk))
        do = self._tensor(c.Lq, c.Dv, c.do)
        row_mask = self._uniform(c.B, c.N) < 0.7 if c.row_mask else None
        needs = tuple(flag == "1" for flag in c.needs)
        scale = None if c.scale == 1.0 else c.scale / c.D**0.5
        return Inputs(q, k, v, bias1, bias2, do, needs, row_mask, scale)

    def _normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def _uniform(self, *shape):
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def _tensor(self, length, channels, layout, factor=1.0):
        c = self.call
        x = (self._normal(c.B, c.N, length, c.H, channels) * factor).to(self.dtype)
        if layout == "heads-first":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        if layout == "strided":
            return x.repeat_interleave(2, dim=-1)[..., ::2]
        if layout == "expanded":
            return x[:, :1].expand_as(x)
        return x

    def _bias(self, kind, dtype, shape):
        if kind == "none":
            return None
        bias = self._normal(*shape)
        value = MASKS[kind]
        if kind == "bool":
            return bias < 0.5
        if value is not None:
            hidden = self._uniform(*shape) < 0.3
            if kind.startswith("rows"):
                hidden |= self._uniform(*shape[:-1], 1) < 0.5
            if kind == "one-key":
                seen = (self._uniform(*shape[:-1], 1) * shape[-1]).long()
                hidden = torch.ones_like(hidden).scatter(-1, seen, False)
            if kind == "padded":
                share = 0.25 + 0.75 * self._uniform(1)  # of the keys that are seen
                keys = torch.arange(shape[-1], device=self.device)
                hidden = (keys > share * shape[-1]).expand(shape)
            bias = bias.masked_fill(hidden, value)
        dtype = self.dtype if dtype == "same" else DTYPES[dtype]
        if dtype == torch.float16:
            bias = torch.where(bias.isfinite(), bias.clamp(-6e4, 6e4), bias)
        return bias.to(dtype)


def draw(generator):
    """A call drawn by a `random.Random`; often tiny, where rounding errors average least."""
    choose = generator.choice

    def length():
        return choose(
            (generator.randint(1, 12), generator.randint(1, 70), generator.randint(1, 260))
        )

    D = choose((generator.randint(1, 16), generator.randint(1, 128), 32))
    Lq, Lk = length(), length()
    N = choose((1, 2, generator.randint(1, 9), generator.randint(1, 70)))
    bias1, bias2 = choose(tuple(MASKS)), choose(("none", "normal", "normal", "inf"))
    if MASKS[bias1] == -1e9 and bias2 == "inf":
        bias2 = "normal"  # else a query with -1e9 on all its keys has no digits, as in eager
    return Call(
        seed=generator.randrange(2**31),
        dtype=choose(tuple(DTYPES)),
        B=choose((1, 1, 2, 3)),
        N=N if Lq * Lk < 5000 else 2,
        Lq=Lq,
        Lk=choose((Lk, Lq)),
        H=choose((1, 2, 4, 5)),
        D=D,
        Dv=choose((D, D, generator.randint(1, 64))),
        spread=choose((1.0, 1.0, 3.0, 10.0)),
        bias1=bias1,
        bias1_dtype=choose(("same", *DTYPES)),
        bias1_full=choose((True, True, False)),
        bias2=bias2,
        bias2_dtype=choose(("same", *DTYPES)),
        bias2_full=choose((True, False)),
        layout=choose(LAYOUTS),
        do=choose(LAYOUTS),
        row_mask=choose((False, False, True)),
        scale=choose((1.0, 1.0, 1.0, 0.0, -1.0, 0.3)),
        needs=choose(("11111", "11111", "".join(choose("01") for _ in range(5)))),
    )


def draw_large(generator):
    """A call whose blocks compute several tiles on a GPU: many rows n or long lengths. Every family
    takes its head dimension and layout as they are.
    """
    choose = generator.choice

    def length():
        return choose(
            (
                generator.randint(1, 70),
                generator.randint(60, 420),
                generator.randint(300, 1700),
                64 * generator.randint(1, 20),
            )
        )

    call = draw(generator)
    Lq, Lk = length(), length()
    Lk = choose((Lk, Lq))
    H = choose((1, 3, 4, 8, 16))
    D = 8 * generator.randint(1, 16)
    share = choose((0.05, 0.3, 1.0))  # of the largest size
    rows = min(MOST_SCORES / (Lq * Lk), MOST_ELEMENTS / ((Lq + 2 * Lk) * 128)) / (call.B * H)
    most = max(1, int(share * rows))
    return replace(
        call,
        N=choose((min(most, 3), generator.randint(1, most), most)),
        Lq=Lq,
        Lk=Lk,
        H=H,
        D=D,
        Dv=choose((D, D, 8 * generator.randint(1, 16))),
        spread=choose((1.0, 3.0)),
        layout=choose(LAYOUTS[:2]),
        do=choose(LAYOUTS[:2]),
    )


def within_limits(call):
    """The call, changed where docs/math.md ("Where the law depends on chance") makes an exception
    for it on a GPU, which computes calls of few scores in float64.
    """
    if call.Lk == 1 or call.B * call.N * call.H * call.Lq * call.Lk <= 4096:
        return call
    if call.dtype != "fp32" and call.Lk <= 3:
        call = replace(call, Lk=4)
    # -6e4 hides a key, but not by (6a); with so many keys, hardly a row n is left with one.
    if call.dtype == "bf16" and MASKS[call.bias1] == -1e9 and call.bias1_dtype == "fp16":
        call = replace(call, Lk=max(call.Lk, 16))
    return call


def of_kind(call, dtype, tier):
    """The call in a dtype and with head dimensions of one kernel."""
    D = tier - call.D % 8
    return replace(call, dtype=dtype, D=D, Dv=min(call.Dv, D))


def smaller(call):
    """Calls that are one step simpler, the largest steps first."""
    plain = Call(seed=call.seed)
    if call.Lq == call.Lk > 1:
        for length in (1, call.Lq // 2, call.Lq - 1):
            yield replace(call, Lq=length, Lk=length)
    for field in fields(Call):
        name, value = field.name, getattr(call, field.name)
        least = getattr(plain, name)
        if name in ("seed", "dtype") or value == least:
            continue
        yield replace(call, **{name: least})
        if isinstance(value, int) and not isinstance(value, bool):
            for candidate in (value // 2, value - 1):
                if candidate > least:
                    yield replace(call, **{name: candidate})
