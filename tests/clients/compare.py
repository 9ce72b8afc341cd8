"""A model's layer on this op against its own plain path: the error law, for the result and the
gradients of input and every parameter, under each precision and mask that models use.
"""

import contextlib
import copy
import importlib
import re
import shlex

import pytest
import torch

from deepspeed4science import drop_in, run_command
from deepspeed4science.drop_in import clients
from tests.numeric import law
from tests.numeric.cases import DEVICES
from tests.unit.test_readme import README, switch_back

L, C, D, H = 20, 24, 8, 3  # models take their plain path up to L = 16

each = pytest.mark.parametrize("device", DEVICES)
precision = pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-autocast"])
mask_kind = pytest.mark.parametrize("mask", ["none", "padded", "ragged"])


def pair_mask(kind, device, rows=2):
    mask = torch.ones(rows, L, L, device=device)
    if kind == "padded":  # as models make it from one mask of tokens
        mask[0, L - 5 :] = 0
        mask[0, :, L - 5 :] = 0
    elif kind == "ragged":
        mask = (torch.rand_like(mask) < 0.7).float()
        mask.diagonal(dim1=1, dim2=2).fill_(1)
    return mask


def randomised(module, std=0.3):
    """The module with random parameters: where some are 0, a wrong result would not show."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module


def check(module, shapes, plain, switched, *, autocast, read=None):
    """`switched(module, *inputs)` against `plain(module, *inputs)`, on inputs of those shapes.

    read   where the result is read, 1 or 0; elsewhere it may be anything (finite)
    """

    def draw():
        device = next(module.parameters()).device
        drawn = [torch.randn(*shape, device=device) for shape in shapes]
        do_ = torch.randn_like(plain(module, *drawn), dtype=torch.float64)
        do_ = do_ if read is None else do_ * read

        def run(function, dtype):
            own = copy.deepcopy(module).to(dtype)
            leaves = [x.to(dtype).requires_grad_() for x in drawn]
            with _autocast(device.type, autocast and dtype == torch.float32):
                o = function(own, *leaves)
            used = [*leaves, *own.parameters()]
            gradients = torch.autograd.grad(o, used, do_.to(o.dtype), allow_unused=True)
            return [o.detach() if read is None else o.detach() * read, *gradients]

        results = run(switched, torch.float32), run(plain, torch.float32), run(plain, torch.float64)
        names = ["O", *(f"input {n}" for n in range(len(shapes)))]
        names += [name for name, _ in module.named_parameters()]
        compared = {}
        for name, ours, eager, reference in zip(names, *results, strict=True):
            assert (ours is None) == (reference is None), f"{name}: whether there is a gradient"
            if ours is not None and not law.is_rounding(reference):
                compared[name] = ours, eager, reference
        return compared

    law.check_stacked(draw, torch.finfo(torch.bfloat16 if autocast else torch.float32).eps)


def check_one_pair_map(layer, switched, seen, *, autocast):
    """`check` of a layer without a batch dimension, which is called as `layer(x, mask=...)`.

    switched   of (layer, x, mask)
    seen       bool `[L, L]`
    """
    check(
        randomised(layer).to(seen.device),
        [(L, L, C)],
        lambda module, x: module(x, mask=seen.to(x.dtype)),
        lambda module, x: switched(module, x, seen.to(x.dtype)),
        autocast=autocast,
        read=seen[..., None],
    )


def _autocast(device, enabled):
    return torch.autocast(device, torch.bfloat16) if enabled else contextlib.nullcontext()


def check_same(ours, theirs, shapes, call_ours, call_theirs):
    """A layer of `deepspeed4science.nn` with the parameters of a model's own, in float32, against
    that one, on inputs of those shapes.
    """
    ours.load_state_dict(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()

    @torch.no_grad()
    def draw():
        inputs = [torch.randn(*shape) for shape in shapes]
        reference = call_theirs(wide, *(x.double() for x in inputs))
        return {"O": (call_ours(ours, *inputs), call_theirs(theirs, *inputs), reference)}

    law.check_stacked(draw, torch.finfo(torch.float32).eps)


def check_recipes(client, capsys):
    """README's command line finds the functions that it switches; its Python line switches them."""
    (line,) = re.findall(rf"python -m deepspeed4science run ({client} .*)", README)
    assert run_command.main(["--dry-run", *shlex.split(line)]) == 0
    said = capsys.readouterr().out
    (recipe,) = re.findall(r"^drop_in\.switch\(\"\w+\"\)", README, re.M)
    assert re.search(rf"\b{client}\b", README[README.index(recipe) :].splitlines()[0])
    functions = clients.functions(clients.find(client))
    try:
        exec(re.sub(r'"\w+"', f'"{client}"', recipe), {"drop_in": drop_in})
        for module, name, where in functions:
            place, _, function = where.partition(":")
            ours = getattr(importlib.import_module(place), function)
            assert getattr(importlib.import_module(module), name) is ours
            assert f"{module}.{name} -> {place}.{function}" in said
    finally:
        switch_back()
