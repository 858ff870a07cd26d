"""What the metadata of torch.distributed.checkpoint is pickled of."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from fzero._torch import load_metadata


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_this_torch_is_read(tmp_path):
    values = {"a": {"w": torch.ones(2, 3)}, "l": [torch.zeros((), dtype=torch.bfloat16), 3], "n": None}
    torch_dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    result = load_metadata((tmp_path / ".metadata").read_bytes())
    metadata = torch_dcp.FileSystemReader(tmp_path).read_metadata()
    assert result.state_dict_metadata == metadata.state_dict_metadata and result.storage_data == metadata.storage_data
    assert result.planner_data == {"a.w": ("a", "w"), "l.0": ("l", 0), "l.1": ("l", 1), "n": ("n",)}


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(3), pickle.dumps(print), pickle.dumps(torch.load)])
def test_other_files_than_metadata_are_refused(data):
    with pytest.raises(pickle.UnpicklingError):
        load_metadata(data)
