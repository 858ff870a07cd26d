"""The workspace of matrix products: `make cuda` measures that it is the allocator's."""

from fzero._torch.workspace import matrix_workspace_bytes


def test_a_cpu_has_no_workspace():
    assert matrix_workspace_bytes("cpu") == 0


def test_the_default_cublas_workspace_is_that_of_hopper(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert matrix_workspace_bytes("cuda") == 32 * 2**20


def test_the_environment_sets_the_cublas_workspace(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert matrix_workspace_bytes("cuda") == 2 * 4096 * 1024 + 8 * 16 * 1024


def test_the_cublas_workspace_of_an_older_card_is_smaller(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert matrix_workspace_bytes("cuda") == 8519680
