"""Tensors, their descriptors, data and parameters; devices and the platform."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import stepgraph as sg
from stepgraph.errors import ArgumentError, DataError
from stepgraph.mlc.refusals import guarded
from stepgraph.mlc.table import Class, Row, call, make, native_name, read, reads, unavailable, write
from stepgraph.mlc.values import (
    BOOL,
    BUFFER,
    DATA,
    DATA_TYPE,
    DATAS,
    DEVICE,
    INT,
    INTS,
    MAX_DIMENSIONS,
    NUMBER,
    SHAPE,
    TENSOR,
    TEXT,
    Kind,
    an,
    list_of,
    one_of,
    optional,
)
from stepgraph.random import initialize


def deallocator(value: Any) -> Callable[..., None]:
    """A function that is called when memory is no longer used."""
    if not callable(value):
        raise TypeError
    return guarded(value, "deallocator")


DESCRIPTOR = an(sg.TensorDescriptor)
RANDOM = one_of(sg.RandomInitializerType)
# The sequence factories take MLCRandomInitializerTypeInvalid for "no initializer".
RANDOM_OR_NONE = Kind(RANDOM.wanted, lambda value: None if value == 0 and value is not False else RANDOM.convert(value))
SCALE = Kind(
    "an MLCTensor or a number", lambda value: (NUMBER if isinstance(value, int | float) else TENSOR).convert(value)
)
DEVICE_DATA = optional(list_of(an(sg.TensorOptimizerDeviceData)))
DEALLOCATOR = Kind("a function (bytes, length)", deallocator)
SIZES: dict[str, Any] = {"width": INT, "height": INT, "channels": INT, "batch_size": INT}
STEPS: dict[str, Any] = {"length": INT, "channels": INT, "batch_size": INT}
SEQUENCES: dict[str, Any] = {"lengths": INTS, "sorted_sequences": BOOL, "channels": INT, "batch_size": INT}


@native_name('TensorData(memoryview(bytesNoCopy).cast("B")[:length])')
def view(buffer: Any, length: int) -> sg.TensorData:
    """The first `length` bytes of a buffer, shared with it where it may be written."""
    return _first_bytes(buffer, length, None)


@native_name('TensorData(memoryview(immutableBytesNoCopy).cast("B")[:length])')
def immutable_view(buffer: Any, length: int) -> sg.TensorData:
    """The same: a parameter's memory holds trained values later, whatever it was called."""
    return _first_bytes(buffer, length, None)


@native_name(
    'TensorData(memoryview(bytesNoCopy).cast("B")[:length], deallocator=lambda: deallocator(bytesNoCopy, length))'
)
def owned_view(buffer: Any, length: int, deallocator: Callable[..., Any]) -> sg.TensorData:
    """The same, with a function that is called once nobody uses the memory."""
    return _first_bytes(buffer, length, partial(deallocator, buffer, length))


def _first_bytes(buffer: Any, length: int, free: Callable[[], Any] | None) -> sg.TensorData:
    if length < 0:
        raise ArgumentError("TensorData", f"length is {length}", fix="give a number of bytes ≥ 0")
    whole = buffer if isinstance(buffer, sg.TensorData) else sg.TensorData(buffer if length else bytearray())
    if length > whole.length:
        raise DataError(
            "TensorData", f"{length} bytes are asked for, the memory has {whole.length}", fix="ask for fewer"
        )
    if length == whole.length and whole is not buffer and free is None:
        return whole
    return sg.TensorData(np.asarray(whole.bytes)[:length], deallocator=free)


@native_name("<class>")
def initialized(shape: sg.TensorDescriptor | tuple[int, ...], random: sg.RandomInitializerType, **settings: Any) -> Any:
    """A tensor with random values; packed weights have the range that was measured, whatever their shape."""
    extents = shape.shape if isinstance(shape, sg.TensorDescriptor) else tuple(shape)
    if len(extents) != 4 or extents[0] != 1 or random is sg.RandomInitializerType.UNIFORM:
        return sg.Tensor(shape, random=random, **settings)
    made = sg.Tensor(shape, **settings)
    fan = 1 if random is sg.RandomInitializerType.GLOROT_UNIFORM else 4  # a bound of √3, a deviation of 0.5
    return sg.Tensor(made.descriptor, data=initialize(random, extents, fan, fan, made.data_type.torch))


@native_name("<class>.image")
def initialized_image(
    width: int, height: int, channels: int, batch_size: int, random: sg.RandomInitializerType
) -> sg.Tensor:
    """The same, by its extents."""
    return initialized(sg.TensorDescriptor.image(width, height, channels, batch_size), random)


def all_bytes(memory: sg.TensorData | None) -> np.ndarray | None:
    """The memory behind a tensor."""
    return None if memory is None else np.asarray(memory.bytes)


def reported(device: sg.Device) -> sg.DeviceType:
    """The type; `any` reports what it resolved to."""
    return device.actual_device_type if device.type is sg.DeviceType.ANY else device.type


def named_devices(value: Any) -> list[Any]:
    """GPUs by PyTorch's names."""
    return list(value) if isinstance(value, list | tuple) else list_of(DEVICE).convert(value)


MLC_TENSOR_DESCRIPTOR = Class(
    "MLCTensorDescriptor",
    sg.TensorDescriptor,
    "NSObject",
    (
        read("dataType", empty=0),
        read("dimensionCount", empty=0),
        *reads("shape stride"),
        read("tensorAllocationSizeInBytes", empty=0),
        read("sequenceLengths"),
        read("sortedSequences", empty=False),
        read("batchSizePerSequenceStep"),
        Row(
            "maxTensorDimensions",
            "class property",
            "TensorDescriptor.max_tensor_dimensions",
            lambda native: MAX_DIMENSIONS,
            swift="maxTensorDimensions",
            note="4 here, as in the original; stepgraph goes up to 5",
        ),
        make("descriptorWithShape:dataType:", shape=SHAPE, data_type=DATA_TYPE),
        make(
            "descriptorWithShape:sequenceLengths:sortedSequences:dataType:",
            shape=SHAPE,
            sequence_lengths=INTS,
            sorted_sequences=BOOL,
            data_type=DATA_TYPE,
            note="shape [batch, steps, features]",
        ),
        make("descriptorWithWidth:height:featureChannelCount:batchSize:", "image", **SIZES),
        make(
            "descriptorWithWidth:height:featureChannelCount:batchSize:dataType:", "image", **SIZES, data_type=DATA_TYPE
        ),
        make(
            "convolutionWeightsDescriptorWithWidth:height:inputFeatureChannelCount:outputFeatureChannelCount:dataType:",
            "convolution_weights",
            width=INT,
            height=INT,
            inputs=INT,
            outputs=INT,
            data_type=DATA_TYPE,
            swift="init(convolutionWeightsWithWidth:height:inputFeatureChannelCount:outputFeatureChannelCount:dataType:)",
        ),
        make(
            "convolutionWeightsDescriptorWithInputFeatureChannelCount:outputFeatureChannelCount:dataType:",
            "convolution_weights",
            inputs=INT,
            outputs=INT,
            data_type=DATA_TYPE,
            swift="init(convolutionWeightsWithInputFeatureChannelCount:outputFeatureChannelCount:dataType:)",
        ),
        make(
            "convolutionBiasesDescriptorWithFeatureChannelCount:dataType:",
            "convolution_biases",
            channels=INT,
            data_type=DATA_TYPE,
            swift="init(convolutionBiasesWithFeatureChannelCount:dataType:)",
        ),
        *unavailable(),
    ),
    copy=copy.copy,
)

MLC_TENSOR_DATA = Class(
    "MLCTensorData",
    sg.TensorData,
    "NSObject",
    (
        *reads("bytes length"),
        make("dataWithBytesNoCopy:length:", view, buffer=BUFFER, length=INT),
        make(
            "dataWithImmutableBytesNoCopy:length:",
            immutable_view,
            buffer=BUFFER,
            length=INT,
            note="memory that can be written is shared and holds trained values later; `bytes` objects are copied",
        ),
        make(
            "dataWithBytesNoCopy:length:deallocator:",
            owned_view,
            buffer=BUFFER,
            length=INT,
            deallocator=DEALLOCATOR,
            note="called with the buffer and the length when the object goes away",
        ),
        *unavailable(note="no bytes"),
    ),
    new=lambda: sg.TensorData(np.empty(0, np.uint8)),
)

MLC_TENSOR = Class(
    "MLCTensor",
    sg.Tensor,
    "NSObject",
    (
        read("tensorID", empty=0),
        read("descriptor"),
        read("data", "memory", shown=all_bytes, note="bytes, all that were given; a result's after it was computed"),
        read("label"),
        write("label", TEXT),
        read("device"),
        read("optimizerData", empty=[]),
        read("optimizerDeviceData", empty=[]),
        read("hasValidNumerics", empty=True),
        make(
            "tensorWithDescriptor:",
            shape=optional(DESCRIPTOR, makes_empty=True),
            note="nil gives an empty tensor",
        ),
        make("tensorWithDescriptor:randomInitializerType:", initialized, shape=DESCRIPTOR, random=RANDOM),
        make("tensorWithDescriptor:fillWithData:", shape=DESCRIPTOR, fill=NUMBER),
        make("tensorWithDescriptor:data:", shape=DESCRIPTOR, data=DATA),
        make("tensorWithShape:", shape=SHAPE),
        make("tensorWithShape:randomInitializerType:", initialized, shape=SHAPE, random=RANDOM),
        make(
            "tensorWithShape:randomInitializerType:dataType:",
            initialized,
            shape=SHAPE,
            random=RANDOM,
            data_type=DATA_TYPE,
            swift="–",
        ),
        make("tensorWithShape:dataType:", shape=SHAPE, data_type=DATA_TYPE),
        make("tensorWithShape:data:dataType:", shape=SHAPE, data=DATA, data_type=DATA_TYPE),
        make("tensorWithShape:fillWithData:dataType:", shape=SHAPE, fill=NUMBER, data_type=DATA_TYPE),
        make("tensorWithWidth:height:featureChannelCount:batchSize:", "image", **SIZES),
        make(
            "tensorWithWidth:height:featureChannelCount:batchSize:fillWithData:dataType:",
            "image",
            **SIZES,
            fill=NUMBER,
            data_type=DATA_TYPE,
        ),
        make(
            "tensorWithWidth:height:featureChannelCount:batchSize:randomInitializerType:",
            initialized_image,
            **SIZES,
            random=RANDOM,
        ),
        make("tensorWithWidth:height:featureChannelCount:batchSize:data:", "image", **SIZES, data=DATA),
        make(
            "tensorWithWidth:height:featureChannelCount:batchSize:data:dataType:",
            "image",
            **SIZES,
            data=DATA,
            data_type=DATA_TYPE,
        ),
        make(
            "tensorWithSequenceLength:featureChannelCount:batchSize:",
            "sequence",
            **STEPS,
            random=sg.RandomInitializerType.UNIFORM,
            note="filled with random numbers, as measured",
        ),
        make(
            "tensorWithSequenceLength:featureChannelCount:batchSize:randomInitializerType:",
            "sequence",
            **STEPS,
            random=RANDOM_OR_NONE,
        ),
        make("tensorWithSequenceLength:featureChannelCount:batchSize:data:", "sequence", **STEPS, data=optional(DATA)),
        make(
            "tensorWithSequenceLengths:sortedSequences:featureChannelCount:batchSize:randomInitializerType:",
            "sequences",
            **SEQUENCES,
            random=RANDOM_OR_NONE,
        ),
        make(
            "tensorWithSequenceLengths:sortedSequences:featureChannelCount:batchSize:data:",
            "sequences",
            **SEQUENCES,
            data=optional(DATA),
        ),
        call("synchronizeData", swift="synchronizeData()"),
        call("synchronizeOptimizerData", swift="synchronizeOptimizerData()"),
        call(
            "copyDataFromDeviceMemoryToBytes:length:synchronizeWithDevice:",
            "copy_data_from_device_memory",
            destination=BUFFER,
            length=INT,
            synchronize_with_device=BOOL,
            swift="copyDataFromDeviceMemory(toBytes:length:synchronizeWithDevice:)",
            note="NO for more bytes than the tensor has",
        ),
        call(
            "bindAndWriteData:toDevice:",
            "bind_and_write_data",
            data=DATA,
            device=DEVICE,
            swift="bindAndWriteData(_:to:)",
            note="also for a tensor made without data, before there is a graph; NO for a shorter buffer",
        ),
        call(
            "bindOptimizerData:deviceData:",
            "bind_optimizer_data",
            data=DATAS,
            device_data=DEVICE_DATA,
            swift="bindOptimizerData(_:deviceData:)",
        ),
        *(
            call(
                f"tensorBy{verb}ToType:scale:bias:{'axis:' * bool(axis)}",
                member,
                refusal="nil",
                data_type=DATA_TYPE,
                scale=SCALE,
                bias=SCALE,
                **axis,
                swift=f"{member}(to:scale:bias:{'axis:' * bool(axis)})".replace(
                    "bias", "zeroPoint" if member == "dequantized" and not axis else "bias"
                ),
                note=note,
            )
            for verb, member, note in (
                ("Quantizing", "quantized", "round(scale x + bias), saturating"),
                ("Dequantizing", "dequantized", "(y - bias) / scale"),
            )
            for axis in ({}, {"axis": INT})
        ),
        *unavailable(note="no descriptor, no data"),
    ),
    copy=sg.Tensor.copy,
)

MLC_TENSOR_OPTIMIZER_DEVICE_DATA = Class(
    "MLCTensorOptimizerDeviceData",
    sg.TensorOptimizerDeviceData,
    "NSObject",
    unavailable("new", note="a handle that the framework fills"),
    new=sg.TensorOptimizerDeviceData,
    copy=copy.copy,
)

MLC_TENSOR_PARAMETER = Class(
    "MLCTensorParameter",
    sg.TensorParameter,
    "NSObject",
    (
        read("tensor"),
        read("isUpdatable", empty=False),
        write("isUpdatable", BOOL),
        make("parameterWithTensor:", tensor=TENSOR),
        make("parameterWithTensor:optimizerData:", tensor=TENSOR, optimizer_data=optional(DATAS)),
        *unavailable(note="no tensor"),
    ),
)

MLC_DEVICE = Class(
    "MLCDevice",
    sg.Device,
    "NSObject",
    (
        Row("type", "property", ".type", reported, swift="type", note="`any` reports what it resolved to", empty=0),
        read("actualDeviceType", empty=0),
        read("gpuDevices", note="PyTorch's devices", empty=[]),
        make("cpuDevice", "cpu", swift="cpu()"),
        make("gpuDevice", "gpu", swift="gpu()", note="nil without a GPU"),
        make("aneDevice", "ane", swift="ane()", note="always nil: there is no Neural Engine here"),
        make("deviceWithType:", "of", kind=one_of(sg.DeviceType)),
        make(
            "deviceWithType:selectsMultipleComputeDevices:",
            "of",
            kind=one_of(sg.DeviceType),
            selects_multiple_compute_devices=BOOL,
            note="a process uses the first GPU; compiling logs how to use all",
        ),
        make(
            "deviceWithGPUDevices:",
            "with_gpus",
            gpus=Kind("a list of GPUs", named_devices),
            swift="init(gpuDevices:)",
            note="PyTorch's devices or their names",
        ),
    ),
    new=sg.Device.any,
    copy=copy.copy,
)

MLC_PLATFORM = Class(
    "MLCPlatform",
    None,
    "NSObject",
    (
        make("setRNGSeedTo:", sg.set_seed, seed=INT, swift="setRNGSeedTo(_:)"),
        make("getRNGseed", sg.get_seed, swift="getRNGseed()"),
    ),
)

CLASSES = (
    MLC_TENSOR_DESCRIPTOR,
    MLC_TENSOR_DATA,
    MLC_TENSOR,
    MLC_TENSOR_OPTIMIZER_DEVICE_DATA,
    MLC_TENSOR_PARAMETER,
    MLC_DEVICE,
    MLC_PLATFORM,
)
