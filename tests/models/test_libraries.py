"""Models of torchvision, timm, diffusers and peft train as they are: `make test-all` with the extra `models`."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero import optim
from fzero.testing import assert_equivalent

pytestmark = pytest.mark.slow

SIZE = 32
Build = Callable[[], nn.Module]


def library(name: str) -> Any:
    """Import a library, or skip: torchvision's build must fit torch's."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


def vision(name: str, **options: Any) -> Build:
    return lambda: getattr(library("torchvision.models"), name)(**options)


def timm(name: str, **options: Any) -> Build:
    return lambda: library("timm").create_model(name, pretrained=False, num_classes=5, **options)


def unet() -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return library("diffusers").UNet2DModel(
        sample_size=SIZE, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 8),
        norm_num_groups=4, attention_head_dim=4, **blocks,
    )  # fmt: skip


VIT = {"image_size": SIZE, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
SWIN = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [2, 2]}
MODELS: dict[str, Build] = {
    "torchvision resnet18": vision("resnet18", num_classes=5),
    "torchvision ViT": vision("VisionTransformer", num_classes=5, **VIT),
    "torchvision Swin": vision("SwinTransformer", num_classes=5, **SWIN),
    "torchvision MobileNetV3": vision("mobilenet_v3_small", num_classes=5),
    "torchvision EfficientNet": vision("efficientnet_b0", num_classes=5),
    "timm ViT": timm("vit_tiny_patch16_224", img_size=SIZE, depth=2, embed_dim=24, num_heads=2),
    "timm ResNet": timm("resnet10t"),
    "timm ConvNeXt": timm("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 4, 8, 8)),
    "diffusers UNet": unet,
}


def train_step_for(module: nn.Module, opt: optim.Optimizer, timed: bool) -> tuple[Any, Any]:
    """Make a train step of a model that is fed images, and a time step if it is a diffusion model."""
    apply, params, buffers = fzero.nn.functional(module.eval())  # no dropout, and BatchNorm's kept statistics

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        arguments = (batch["x"], batch["t"]) if timed else (batch["x"],)
        out, _ = apply(params, buffers, *arguments)
        out = getattr(out, "sample", out)
        return (out.flatten(1)[:, :3] - batch["y"]).square().mean()

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step, params


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_library_equals_unsharded_training(name):
    torch.manual_seed(0)
    module, opt = MODELS[name]().double(), optim.sgd(1e-2)  # gradients that are zero but for rounding have no moments
    train_step, params = train_step_for(module, opt, timed=name.startswith("diffusers"))
    images = torch.randn(2, 4, 3, SIZE, SIZE, dtype=torch.float64)
    targets, times = torch.randn(2, 4, 3, dtype=torch.float64), torch.randint(0, 9, (2, 4))
    batches = [{"x": x, "y": y, "t": t} for x, y, t in zip(images, targets, times, strict=True)]
    assert_equivalent(train_step, params, opt, batches, [0, 2, 3], [2], rtol=1e-9)
    lockstep = [fzero.mesh(dp=2, simulate="lockstep")]
    assert_equivalent(train_step, params, opt, batches, [3], rtol=1e-9, meshes=lockstep)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's of transformers
def test_lora_of_peft_trains_its_adapters_alone():
    peft, transformers = library("peft"), library("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )
    apply, adapters, frozen = fzero.nn.functional(model)  # what needs no gradient is a buffer
    opt = optim.adamw(1e-2, eps=1e-3)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        out, _ = apply(params, frozen, input_ids=batch["x"], use_cache=False)
        return nn.functional.cross_entropy(out.logits.flatten(0, 1), batch["x"].flatten())

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    assert adapters and all("lora_" in name for name in adapters)
    batches = [{"x": x} for x in torch.randint(0, 37, (2, 4, 8))]
    assert_equivalent(train_step, adapters, opt, batches, [0, 2, 3], [2], rtol=1e-9)
