"""Estimates by the formulas of other libraries: they give the numbers in the documentation of those libraries."""

import pytest

from fzero import tuning

T5 = 2_851_000_000, 32_000_000  # T5-3B in DeepSpeed's documentation: parameters, those of the largest layer

# of DeepSpeed's documentation (memory.rst), GiB of a host and of a device, with 8 devices on one host
ZERO2 = {True: (127.45, 5.31), False: (127.45, 15.93)}
ZERO3 = {(True, True): (71.69, 0.12), (True, False): (63.72, 0.78), (False, False): (1.43, 6.09)}


@pytest.mark.parametrize("offload", ZERO2)
def test_zero2_on_t5_takes_the_bytes_that_deepspeed_says(offload):
    estimate = tuning.deepspeed_zero2(T5[0], devices_per_host=8, offload=offload)
    assert (round(estimate.host_bytes / 2**30, 2), round(estimate.device_bytes / 2**30, 2)) == ZERO2[offload]


@pytest.mark.parametrize("offload,params", ZERO3)
def test_zero3_on_t5_takes_the_bytes_that_deepspeed_says(offload, params):
    estimate = tuning.deepspeed_zero3(*T5, devices_per_host=8, offload=offload, offload_params=params)
    assert (round(estimate.host_bytes / 2**30, 2), round(estimate.device_bytes / 2**30, 2)) == ZERO3[offload, params]


def test_more_hosts_hold_less_each():
    one, two = (tuning.deepspeed_zero3(*T5, devices_per_host=8, hosts=n, offload=True) for n in (1, 2))
    assert two.host_bytes == one.host_bytes / 2 and two.device_bytes < one.device_bytes
    assert tuning.deepspeed_zero2(T5[0], devices_per_host=8, hosts=2).device_bytes == 4 * T5[0] + T5[0]


def test_parameters_alone_are_not_offloaded():
    with pytest.raises(ValueError, match="offload_params=True: DeepSpeed offloads parameters with the optimizer's"):
        tuning.deepspeed_zero3(*T5, devices_per_host=8, offload_params=True)
