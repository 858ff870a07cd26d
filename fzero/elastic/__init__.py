"""Runs that go on with the ranks that are left, by torchrun's elastic agent: `fzero.elastic.run`."""

from fzero.elastic._elastic_run import ElasticRun, run

__all__ = ["ElasticRun", "run"]
