"""What pyright reads instead of transformers: the types that fzero uses, and Any for a model.

The package's own `__init__` names the classes of all models. Reading 2,700 files for them takes half of the time.
"""

from typing import Any

from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback

def __getattr__(name: str) -> Any: ...
