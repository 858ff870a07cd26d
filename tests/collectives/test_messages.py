"""Messages between two ranks: what arrives, their transposes, and ranks that do not meet."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import PerRank


def lockstep(n: int) -> fzero.ranks.Mesh:
    return fzero.mesh(pp=n, simulate="lockstep")


def here() -> int:
    return int(fzero.axes.axis_index("pp").item())


@given(st.integers(2, 5), st.data())
def test_messages_arrive_by_their_tag_in_any_order(n, data):
    messages = data.draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(1, n - 1), st.integers(0, 2)), max_size=9)
    )
    wanted = data.draw(st.permutations(range(len(messages))))  # in which they are received

    def program() -> PerRank:
        actual = torch.zeros(len(messages) + 1)
        for i, (sender, step, tag) in enumerate(messages):
            if here() == sender:
                fzero.collectives.send(torch.tensor([10.0 + i]), (sender + step) % n, "pp", tag=3 * i + tag)
        for i in wanted:
            sender, step, tag = messages[i]
            if here() == (sender + step) % n:
                actual[i] = fzero.collectives.receive(torch.empty(1), sender, "pp", tag=3 * i + tag)[0]
        return PerRank(actual)

    actual = lockstep(n).spmd(program)().value
    for i, (sender, step, _) in enumerate(messages):
        assert actual[(sender + step) % n, i] == 10.0 + i
    assert (actual != 0).sum() == len(messages)


def test_messages_of_one_tag_arrive_in_their_order():
    def program() -> PerRank:
        if here() == 0:
            for i in range(4):
                fzero.collectives.send(torch.tensor(float(i)), 1, "pp")
            return PerRank(torch.zeros(4))
        return PerRank(torch.stack([fzero.collectives.receive(torch.empty(()), 0, "pp") for _ in range(4)]))

    assert lockstep(2).spmd(program)().value[1].tolist() == [0, 1, 2, 3]


def test_a_sent_tensor_may_be_written_afterwards():
    def program() -> PerRank:
        x = torch.ones(2)
        if here() == 0:
            fzero.collectives.send(x, 1, "pp")
            x.zero_()
        return PerRank(fzero.collectives.receive(x, 0, "pp") if here() else x)

    assert lockstep(2).spmd(program)().value.tolist() == [[0, 0], [1, 1]]


@given(st.sampled_from([torch.float32, torch.float64]), st.lists(st.integers(0, 3), max_size=3))
def test_send_and_receive_are_each_others_transposes(dtype, shape):
    """<receive(send(x)), y> = <x, back(y)>, as one linear map of all ranks."""
    x, y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)

    def program() -> PerRank:
        if here() == 0:
            ticket, pull = torch.func.vjp(lambda v: fzero.collectives.send(v, 1, "pp"), x)
            (back,) = pull(torch.ones_like(ticket))
            return PerRank((x * back).sum())
        actual, pull = torch.func.vjp(
            lambda t: fzero.collectives.receive(x, 0, "pp", ticket=t), torch.zeros((), dtype=dtype)
        )
        pull(y)
        return PerRank((actual * y).sum())

    there, back = lockstep(2).spmd(program)().value
    torch.testing.assert_close(there, back)


def test_the_gradient_through_messages_equals_that_on_one_rank():
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if here() == 0:
            return fzero.collectives.send(torch.tanh(w * x), 1, "pp")
        return (fzero.collectives.receive(x, 0, "pp", ticket=w) * w).square().sum()

    w, x = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    program = lockstep(2).spmd(lambda w: PerRank(torch.func.grad(lambda w: loss(w, x))(w[0])))
    grads = program(fzero.mesh(pp=2).split(w)).value
    expected = torch.func.grad(lambda w: (torch.tanh(w[0] * x) * w[1]).square().sum())(w)
    torch.testing.assert_close(grads.flatten(), expected)


def test_record_counts_messages():
    def program() -> None:
        if here() == 0:
            fzero.collectives.send(torch.ones(3, 4), 1, "pp")
        if here() == 1:
            fzero.collectives.receive(torch.ones(3, 4), 0, "pp")

    with fzero.collectives.record() as log:
        lockstep(3).spmd(program)()
    assert [(e.kind, e.axis, e.elements) for e in log.events] == [("send", "pp", 12)]


@pytest.mark.parametrize(
    "program,said",
    [
        (
            lambda: fzero.collectives.receive(torch.ones(2), 0, "pp", tag=7) and None if here() == 2 else None,
            r"rank 2 waits in receive of a message from rank 0 with tag 14 over 'pp' of float32 \[2\]",
        ),
        (
            lambda: fzero.collectives.send(torch.ones(5), 2, "pp") and None if here() == 1 else None,
            r"rank 1 sent rank 2 a message with tag 0 over 'pp' of float32 \[5\], and all ended before it was rec",
        ),
    ],
)
def test_a_message_without_its_counterpart_names_the_ranks(program, said):
    def whole() -> PerRank:
        program()
        return PerRank(torch.zeros(1))

    with pytest.raises(fzero.errors.DivergedError, match=said):
        lockstep(3).spmd(whole)()


def test_another_shape_or_dtype_is_an_error_on_the_receiver():
    for like in (torch.ones(3), torch.ones(2, dtype=torch.float64)):

        def program(like: torch.Tensor = like) -> PerRank:
            if here() == 0:
                fzero.collectives.send(torch.ones(2), 1, "pp")
            elif here() == 1:
                fzero.collectives.receive(like, 0, "pp")
            return PerRank(torch.zeros(1))

        with pytest.raises(
            ValueError, match=r"from rank 0 to rank 1 with tag 0 over 'pp' is float32 \[2\], and the rec"
        ):
            lockstep(2).spmd(program)()


def test_wrong_arguments_of_send_and_receive_are_refused():
    def program() -> None:
        for to in (0, 5, -1, 1.0):
            with pytest.raises(ValueError, match="expected another rank of the axis"):
                fzero.collectives.send(torch.ones(1), to, "pp") if here() == 0 else fzero.collectives.send(
                    torch.ones(1), 7, "pp"
                )
        with pytest.raises(ValueError, match="tag=-1"):
            fzero.collectives.receive(torch.ones(1), (here() + 1) % 2, "pp", tag=-1)
        with pytest.raises(ValueError, match=r"the ticket is \[1\]"):
            fzero.collectives.receive(torch.ones(1), (here() + 1) % 2, "pp", ticket=torch.ones(1))
        with pytest.raises(ValueError, match="'tp' is not bound"):
            fzero.collectives.receive(torch.ones(1), 0, "tp")

    lockstep(2).spmd(program)()


def test_send_under_vmap_is_refused_and_advises_ppermute():
    with pytest.raises(RuntimeError, match=r"one program.*use fzero\.collectives\.ppermute"):
        fzero.mesh(pp=2).spmd(lambda x: fzero.collectives.send(x, 1, "pp"))(torch.ones(2))
