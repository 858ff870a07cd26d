"""Optimizers that read leaves as matrices, on any layout: Adafactor by rows and columns, Muon by whole matrices."""

from fzero.optim.matrices._adafactor import AdafactorState, adafactor
from fzero.optim.matrices._muon import MuonState, muon

__all__ = ["AdafactorState", "MuonState", "adafactor", "muon"]
