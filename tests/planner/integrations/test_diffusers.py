"""`planner.within` in the training loop that diffusers documents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import planner
from tests.support.measured_loops import MeasuredLoop, Trial

diffusers = pytest.importorskip("diffusers")


def unet() -> torch.nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16,
        attention_head_dim=8, dropout=0.1).train()


def train(loop: MeasuredLoop, budget: int | None) -> None:
    """Three steps to predict the noise, clipped."""
    net = loop.model if budget is None else planner.within(loop.model, budget, time_limit=1)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    # Made before memory is measured: of what a loop makes beside the model nothing is known.
    torch.manual_seed(3)
    batches = [(torch.randn(4, 4, 16, 16), torch.randn(4, 6, 16), torch.randn(4, 4, 16, 16))
               for _ in range(3)]

    def run() -> None:
        for images, text, noise in batches:
            loop.begin_step()
            timesteps = torch.randint(0, 100, (4,))
            noisy = scheduler.add_noise(images, noise, timesteps)
            loss = F.mse_loss(net(noisy, timesteps, text).sample, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loop.note_loss(loss)

    loop.run(run)


@pytest.mark.slow
def test_a_conditional_unet():
    trial = Trial.of(unet, train)
    trial.check(steps=3)
    trial.check_equal()
