"""A weight plus its low-rank delta does what the built ``W + L R`` does, and never builds it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig
from transformers.integrations import moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.parity import ATOL
from tplora.adapter.low_rank import LowRankSum
from tplora.upstream import grouped_mm

E, M, N, R, T = 5, 6, 4, 3, 7
# In these a sum of at most 16 products of numbers near one is off by a few of its last digits.
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 0.25}


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape) + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _sum_of(*stack: int, m: int = M, n: int = N, r: int = R) -> LowRankSum:
    w, left, right = _draw(*stack, m, n), _draw(*stack, m, r, seed=1), _draw(*stack, r, n, seed=2)
    return LowRankSum(w, left.requires_grad_(), right.requires_grad_())


def _outcome(fn, weight, like: LowRankSum, x) -> list[torch.Tensor]:
    """The value, and the gradients of L, R and the input."""
    y = fn(weight, x)
    dy = _draw(*y.shape, seed=9).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [like.left, like.right, x], dy)]


def _assert_same(fn, w: LowRankSum, x: torch.Tensor, atol: float = ATOL) -> None:
    x.requires_grad_()
    found = _outcome(fn, w, w, x)
    wanted = _outcome(fn, w.weight + w.left @ w.right, w, x)
    for what, one, other in zip(["y", "dL", "dR", "dx"], found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda m, w=what: f"{w}: {m}")


ON_A_MATRIX = {
    "linear": lambda w, x: F.linear(x, w),
    "linear by name": lambda w, x: F.linear(input=x, weight=w),
    "linear with bias": lambda w, x: F.linear(x, w, _draw(M)),
    "matmul from the left": lambda w, x: torch.matmul(w, x.T),
    "matmul from the right": lambda w, x: torch.matmul(x, w.T),
    "mm from the left": lambda w, x: torch.mm(w, x.T),
    "mm from the right": lambda w, x: torch.mm(x, w.t()),
    "w @ x": lambda w, x: w @ x.mT,
    "x @ w": lambda w, x: x @ w.transpose(0, 1),
    "a vector @ w": lambda w, x: x[0] @ w.mT,
    "x.matmul(w)": lambda w, x: x.matmul(w.transpose(-1, -2)),
    "in another dtype and back": lambda w, x: F.linear(x, w.to(torch.float64).type(x.dtype)),
    "in the dtype of x": lambda w, x: F.linear(x, w.type_as(x)),
    "groups of rows": lambda w, x: torch.bmm(w.view(2, M // 2, N), x.T.expand(2, -1, -1)),
    "groups of rows, sized by -1": lambda w, x: x @ w.view(3, -1, N).transpose(1, 2),
}


@pytest.mark.parametrize("name", ON_A_MATRIX)
def test_a_matrix_equals_the_built_one(name):
    _assert_same(ON_A_MATRIX[name], _sum_of(), _draw(T, N))


IDS = torch.tensor([4, 0, 0, 2, 4, 3, 1])
ON_A_STACK = {
    "bmm from the right": lambda w, x: torch.bmm(x.expand(E, -1, -1), w.transpose(1, 2)),
    "bmm from the left": lambda w, x: torch.bmm(w, x.T.expand(E, -1, -1)),
    "matmul": lambda w, x: torch.matmul(x, w.mT),
    "one expert": lambda w, x: F.linear(x, w[3]),
    "the last expert": lambda w, x: F.linear(x, w[-1]),
    "an expert by a tensor": lambda w, x: F.linear(x, w[torch.tensor(2)]),
    "every other expert": lambda w, x: torch.matmul(x, w[::2].mT),
    "an expert for each row": lambda w, x: torch.bmm(w[IDS], x.unsqueeze(-1)),
    "a list of experts": lambda w, x: torch.bmm(w[IDS.tolist()], x.unsqueeze(-1)),
    "those of a mask": lambda w, x: torch.matmul(w[torch.arange(E) > 1], x.mT),
    "all in turn": lambda w, x: sum(F.linear(x, one) * k for k, one in enumerate(w)),
    "one twice, others never": lambda w, x: F.linear(x, w[1]) * F.linear(x, w[1] if len(w) else w),
}


@pytest.mark.parametrize("name", ON_A_STACK)
def test_a_stack_equals_the_built_one(name):
    _assert_same(ON_A_STACK[name], _sum_of(E), _draw(T, N))


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_an_embedding_equals_the_built_one(padding_idx):
    """The padding row's delta is looked up; its gradient reaches neither L nor R."""
    tokens = torch.tensor([[0, 2, 5, 2], [5, 1, 1, 3]])
    _assert_same(lambda w, x: F.embedding(tokens, w, padding_idx) * x, _sum_of(), _draw(1, N))


def test_float_is_float32_of_all_three():
    w = _sum_of().float()
    assert {w.weight.dtype, w.left.dtype, w.right.dtype, w.dtype} == {torch.float32}


@pytest.mark.parametrize("r", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_grouped_mm_equals_the_built_one(r, dtype, is_transposed):
    """One expert without tokens; ranks whose rows do not end on 16 bytes."""
    m, n = (8, 16) if is_transposed else (16, 8)
    drawn = _sum_of(E, m=m, n=n, r=r)
    parts = [part.detach().to(dtype) for part in (drawn.weight, drawn.left, drawn.right)]
    w = LowRankSum(parts[0], parts[1].requires_grad_(), parts[2].requires_grad_())
    offs = torch.tensor([2, 2, 5, 6, T], dtype=torch.int32)

    def multiply(w, x):
        return grouped_mm(x, w if is_transposed else w.transpose(-2, -1), offs)

    _assert_same(multiply, w, _draw(T, 8).to(dtype), LOOSE[dtype])


UNKNOWN = {
    "sin": lambda w: torch.sin(w),
    "softmax": lambda w: torch.softmax(w, -1),
    "einsum": lambda w: torch.einsum("eoi,ti->eto", w, _draw(T, N)),
    "cat": lambda w: torch.cat([w, w]),
    "chunk": lambda w: torch.chunk(w, 2),
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "sub": lambda w: _draw(N) - w,
    "mul": lambda w: w * 2,
    "rmul": lambda w: 2 * w,
    "truediv": lambda w: w / 2,
    "eq": lambda w: w == 0,
    "bool": lambda w: bool(w),
    "setitem": lambda w: w.__setitem__(0, 1),
    "copy": lambda w: torch.empty(E, M, N).copy_(w),
    "zeros_like": lambda w: torch.zeros_like(w),
    "addmm": lambda w: torch.addmm(_draw(M), _draw(T, N), w[0].T),
    "indexed": lambda w: w[0, 1],
    "indexed by tensor": lambda w: w[torch.ones(E, R, dtype=torch.bool)],
    "transposed by 0, 1": lambda w: w.transpose(0, 1),
    "viewed": lambda w: w[0].view(-1),
    "embedding with max_norm": lambda w: F.embedding(IDS, w[0], max_norm=1.0),
    "embedding with sparse": lambda w: F.embedding(IDS, w[0], sparse=True),
    "grouped_mm with bias": lambda w: F.grouped_mm(
        _draw(T, N), w.mT, offs=torch.ones(E, dtype=torch.int32), bias=_draw(E, M)
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_to_be_linear_is_refused_by_name(name):
    first, *_ = name.split(" by ")
    with pytest.raises(NotImplementedError, match=first):
        UNKNOWN[name](_sum_of(E))


def test_a_stack_has_no_t():
    """torch's T of three dims turns all of them around."""
    for turn in (lambda w: w.T, lambda w: w.t()):
        with pytest.raises(NotImplementedError, match="transposed"):
            turn(_sum_of(E))


def test_methods_that_would_leave_the_adapter_out_do_not_exist():
    for name in ("sum", "data", "mean", "detach", "reshape", "numpy"):
        assert not hasattr(_sum_of(E), name), name
    with pytest.raises(IndexError):
        _sum_of(E)[E]


class _Created(TorchDispatchMode):
    """While open, keeps the number of elements of everything that has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, list[str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for one in _tensors(result):
            storage = one.untyped_storage()
            if storage.data_ptr() not in given:
                num_elements = storage.nbytes() // one.element_size()
                self.sizes.setdefault(num_elements, []).append(str(func))
        return result


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _experts(implementation: str) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=12,
        num_experts=E,
        experts_implementation=implementation,
    )
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter.requires_grad_(False))
    return experts


def _run_experts(implementation: str, *, is_built: bool) -> tuple[_Created, set[int], list]:
    """Forward and backward of 4 tokens with 2 experts each; also the sizes of both weights."""
    torch.manual_seed(1)
    experts = _experts(implementation)
    sums = {}
    for name, w in list(experts.named_parameters()):
        left, right = torch.randn(E, w.shape[1], R), torch.randn(E, R, w.shape[2])
        sums[name] = LowRankSum(w.data, left.requires_grad_(), right.requires_grad_())
    x = torch.randn(4, 16, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 4], [4, 2], [0, 4]])
    leaves = [x, *(leaf for w in sums.values() for leaf in (w.left, w.right))]
    with _Created() as created:
        for name, w in sums.items():
            experts._parameters[name] = w.weight + w.left @ w.right if is_built else w
        y = experts(x, ids, torch.full((4, 2), 0.5))
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    return created, {w.weight.numel() for w in sums.values()}, [y.detach(), *grads]


IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_equal_those_with_built_weights(implementation):
    found, wanted = (_run_experts(implementation, is_built=b)[2] for b in (False, True))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_of_the_size_of_all_experts_is_ever_made(implementation):
    """Nor a gradient of the frozen W: torch's kernels ask whether it is wanted."""
    created, whole, _ = _run_experts(implementation, is_built=False)
    made = {size: created.sizes[size] for size in whole & set(created.sizes)}
    assert not made


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_dispatch_mode_sees_a_built_delta(implementation):
    created, whole, _ = _run_experts(implementation, is_built=True)
    assert whole <= set(created.sizes)


def test_the_fallback_for_grouped_mm_makes_a_gradient_of_a_frozen_weight(monkeypatch):
    """Upstream's own cost where torch has no kernel; with it the delta is still not built."""
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    created, whole, found = _run_experts("grouped_mm", is_built=False)
    made = {str(op) for size in whole for op in created.sizes.get(size, [])}
    assert made == {"transformers.grouped_mm_fallback_backward.default"}, made
    for one, other in zip(found, _run_experts("eager", is_built=True)[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_gradients_of_experts_picked_one_by_one_are_gathered_once():
    """``left[k]`` for each expert would fill a gradient of all experts for each of them."""
    w, x = _sum_of(E), _draw(T, N)
    with _Created() as created:
        sum(F.linear(x, w[torch.tensor(k)]).sum() for k in range(E)).backward()
    for leaf in (w.left, w.right):
        assert len(created.sizes[leaf.numel()]) == 1
