"""Descriptors, tensors, the memory behind them, parameters and data types."""

import array
import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.tensors import buffers

CPU = sg.Device.cpu()
TYPES = {  # Apple's raw value (ours above 1000), bytes of an element, spellings
    sg.DataType.FLOAT32: (1, 4, ("float32", "torch.float32", torch.float32, np.float32, np.dtype("float32"))),
    sg.DataType.FLOAT16: (3, 2, ("float16", torch.float16, np.float16)),
    sg.DataType.BOOLEAN: (4, 1, ("boolean", "bool", torch.bool, np.bool_, bool)),
    sg.DataType.INT64: (5, 8, ("int64", torch.int64, torch.long, np.int64)),
    sg.DataType.INT32: (7, 4, ("int32", torch.int32, np.int32)),
    sg.DataType.INT8: (8, 1, ("int8", torch.int8, np.int8)),
    sg.DataType.UINT8: (9, 1, ("uint8", torch.uint8, np.uint8)),
    sg.DataType.BFLOAT16: (1001, 2, ("bfloat16", torch.bfloat16)),
    sg.DataType.FLOAT64: (1002, 8, ("float64", torch.float64, np.float64, float)),
}


class OnlyDLPack:
    """An array of a library nobody knows: DLPack is all it offers."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


class TestDataType:
    def test_every_type_stands_in_the_table(self) -> None:
        assert set(TYPES) == set(sg.DataType)

    @pytest.mark.parametrize("kind", TYPES, ids=str)
    def test_raw_value_size_and_spellings(self, kind: sg.DataType) -> None:
        raw, size, spellings = TYPES[kind]
        assert (int(kind), kind.element_size) == (raw, size)
        assert [sg.DataType.of(one) for one in (kind, kind.torch, *spellings)] == [kind] * (len(spellings) + 2)
        assert kind.is_floating == ("float" in kind.debug_description)

    @pytest.mark.parametrize("spelling", ["complex64", np.uint16, torch.complex64, 0, 2, 10, object(), None])
    def test_types_without_storage_are_refused(self, spelling: Any) -> None:
        with pytest.raises(sg.DataTypeError, match=r"is not a data type of stepgraph(.|\n)*Fix: use one of float32"):
            sg.DataType.of(spelling)


class TestDescriptor:
    @pytest.mark.parametrize(
        ("shape", "kind", "stride", "size"),
        [
            ((2, 3, 4, 5), "float32", (240, 80, 20, 4), 480),
            ((2, 3, 4, 5), "float16", (120, 40, 10, 2), 240),
            ((7,), "int64", (8,), 56),
            ((3, 1), "boolean", (1, 1), 3),
            ((1, 2, 3, 4, 5), "uint8", (120, 60, 20, 5, 1), 120),
        ],
    )
    def test_strides_and_sizes_are_bytes(self, shape: tuple, kind: str, stride: tuple, size: int) -> None:
        descriptor = sg.TensorDescriptor(shape, kind)
        assert (descriptor.stride, descriptor.tensor_allocation_size_in_bytes) == (stride, size)
        assert (descriptor.shape, descriptor.dimension_count) == (shape, len(shape))
        assert descriptor.element_count * descriptor.data_type.element_size == size
        assert (descriptor.sequence_lengths, descriptor.batch_size_per_sequence_step) == (None, None)

    @pytest.mark.parametrize(
        ("descriptor", "shape"),
        [
            (sg.TensorDescriptor.image(5, 4, 3, 2), (2, 3, 4, 5)),
            (sg.TensorDescriptor.convolution_weights(4, 5, width=3, height=2), (1, 20, 2, 3)),
            (sg.TensorDescriptor.convolution_weights(4, 5), (1, 20, 1, 1)),
            (sg.TensorDescriptor.convolution_biases(5), (1, 5, 1, 1)),
            (sg.TensorDescriptor([np.int64(2), 3]), (2, 3)),
        ],
    )
    def test_factories_give_the_shapes_of_the_original(self, descriptor: sg.TensorDescriptor, shape: tuple) -> None:
        assert (descriptor.shape, descriptor.data_type) == (shape, sg.DataType.FLOAT32)
        assert all(type(extent) is int for extent in descriptor.shape)

    def test_factories_take_a_type(self) -> None:
        assert sg.TensorDescriptor.image(5, 4, 3, 2, sg.DataType.FLOAT16).data_type is sg.DataType.FLOAT16
        assert sg.TensorDescriptor.convolution_biases(5, "int8").data_type is sg.DataType.INT8

    def test_is_a_value(self) -> None:
        one, same, other = (sg.TensorDescriptor((2, 3), kind) for kind in ("float32", torch.float32, "float16"))
        assert (one, hash(one)) == (same, hash(same))
        assert one != other
        with pytest.raises(AttributeError):
            one.shape = (1,)  # type: ignore[misc]

    def test_five_extents_are_the_most(self) -> None:
        assert sg.TensorDescriptor.max_tensor_dimensions == sg.TensorDescriptor((1,) * 5).dimension_count == 5

    @pytest.mark.parametrize("shape", [(), (1,) * 6, (2, 0), (2, -1), (2.5,), (2, True), "ab", (None,)], ids=repr)
    def test_refused_shapes(self, shape: Any) -> None:
        with pytest.raises(sg.ShapeError, match=r"TensorDescriptor: .*shape"):
            sg.TensorDescriptor(shape)

    @pytest.mark.parametrize(
        ("shape", "lengths", "alive"),
        [
            ((1, 3, 2), (3, 2, 1), (3, 2, 1)),  # measured on the original: one row, three sequences
            ((2, 3, 2), (3, 3), (2, 2, 2)),
            ((3, 4, 1), (1, 4, 2), (3, 2, 1, 1)),
        ],
    )
    def test_sequences_alive_at_each_step(self, shape: tuple, lengths: tuple, alive: tuple) -> None:
        descriptor = sg.TensorDescriptor(shape, sequence_lengths=list(lengths))
        assert (descriptor.sequence_lengths, descriptor.batch_size_per_sequence_step) == (lengths, alive)

    @pytest.mark.parametrize(
        ("shape", "lengths", "ordered", "error", "words"),
        [
            ((2, 3), (3, 3), False, sg.ShapeError, r"\(2, 3\)"),
            ((2, 3, 1), (4, 3), False, sg.ShapeError, r"4 steps .*\(2, 3, 1\)"),
            ((2, 3, 1), (2, 2), False, sg.ShapeError, r"2 steps .*\(2, 3, 1\)"),
            ((2, 3, 1), (3, 0), False, sg.ShapeError, r"0 in the sequence_lengths"),
            ((2, 3, 1), (), False, sg.ShapeError, r"sequence_lengths"),
            ((5, 3, 1), (3, 3), False, sg.ShapeError, r"2 .*5"),  # neither one length a row nor one row
            ((2, 3, 1), (2, 3), True, sg.ArgumentError, r"\(2, 3\) are not sorted"),
        ],
    )
    def test_refused_sequences(self, shape: tuple, lengths: tuple, ordered: bool, error: type, words: str) -> None:
        with pytest.raises(error, match=words):
            sg.TensorDescriptor(shape, sequence_lengths=lengths, sorted_sequences=ordered)


class TestMaking:
    def test_ids_count_up_and_name_the_tensor(self) -> None:
        first, second = sg.Tensor((1,)), sg.Tensor((1,))
        assert second.tensor_id == first.tensor_id + 1
        assert [one.label for one in (first, second)] == [f"data{one.tensor_id}" for one in (first, second)]
        second.label = "weights"
        assert repr(second) == "Tensor('weights', [1] float32)"
        assert sg.Tensor((1,), label="given").label == "given"

    @pytest.mark.parametrize(
        ("tensor", "shape", "lengths"),
        [
            (sg.Tensor((2, 3)), (2, 3), None),
            (sg.Tensor([4]), (4,), None),
            (sg.Tensor.image(5, 4, channels=3, batch_size=2), (2, 3, 4, 5), None),
            (sg.Tensor.sequence(3, channels=2, batch_size=2), (2, 3, 2), (3, 3)),
            (sg.Tensor.sequences([3, 2, 1], 2, 1), (1, 3, 2), (3, 2, 1)),
            (sg.Tensor(sg.TensorDescriptor((2, 3))), (2, 3), None),
        ],
    )
    def test_factories_make_float32_without_data(self, tensor: sg.Tensor, shape: tuple, lengths: tuple | None) -> None:
        assert (tensor.shape, tensor.data_type) == (shape, sg.DataType.FLOAT32)
        assert tensor.descriptor.sequence_lengths == lengths
        assert (tensor.data, tensor.has_data, tensor.has_valid_numerics) == (None, False, True)
        assert (tensor.device, tensor.optimizer_data, tensor.optimizer_device_data) == (None, [], [])
        tensor.synchronize_data()  # nothing to do, as measured
        tensor.synchronize_optimizer_data()

    @pytest.mark.parametrize("kind", TYPES, ids=str)
    def test_fill_casts_to_the_type(self, kind: sg.DataType) -> None:
        tensor = sg.Tensor((2, 3), kind, fill=1)
        assert tensor.torch().dtype == kind.torch
        assert tensor.torch().tolist() == [[1] * 3] * 2

    def test_factories_pass_settings_on(self) -> None:
        made = [
            sg.Tensor.image(2, 1, 1, 1, fill=3.0, data_type="float16", label="a"),
            sg.Tensor.sequence(2, 1, 1, data=[3, 3], label="b"),
            sg.Tensor.sequences([2, 1], 1, 2, fill=3, data_type="int32", sorted_sequences=True),
        ]
        assert [one.data_type.debug_description for one in made] == ["float16", "float32", "int32"]
        assert [one.torch().unique().tolist() for one in made] == [[3], [3], [3]]
        assert [one.label for one in made[:2]] == ["a", "b"]
        assert made[2].descriptor.sorted_sequences

    def test_glorot_bound_and_xavier_deviation_use_both_fans(self) -> None:
        sg.set_seed(1)
        uniform, glorot, xavier = (sg.Tensor((300, 100), random=kind).numpy() for kind in sg.RandomInitializerType)
        assert (uniform.min() >= 0, uniform.max() < 1) == (True, True)
        assert np.abs(glorot).max() == pytest.approx((6 / 400) ** 0.5, rel=1e-3)
        assert xavier.std() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
        assert abs(xavier.mean()) < 0.002

    @pytest.mark.parametrize("shape", [(64,), (40, 80), (30, 20, 9), (16, 8, 5, 3), (8, 6, 3, 3, 3), (1, 600, 3, 3)])
    def test_fans_are_those_of_pytorch(self, shape: tuple[int, ...]) -> None:
        sg.set_seed(1)
        glorot, xavier = (sg.Tensor(shape, random=kind).numpy() for kind in list(sg.RandomInitializerType)[1:])
        like = torch.empty(shape if len(shape) > 1 else shape * 2)
        fan_in, fan_out = torch.nn.init._calculate_fan_in_and_fan_out(like)
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert 0.9 * bound < np.abs(glorot).max() <= bound
        assert xavier.std() == pytest.approx((2 / (fan_in + fan_out)) ** 0.5, rel=0.25)

    def test_a_seed_repeats_and_moves_on(self) -> None:
        def draw() -> list[float]:
            layer = sg.FullyConnectedLayer.create(3, 2)
            return [*sg.Tensor((4,), random=sg.RandomInitializerType.UNIFORM).numpy(), *layer.weights.numpy().flat]

        sg.set_seed(11)
        first, second = draw(), draw()
        sg.set_seed(11)
        assert (draw(), draw()) == (first, second)
        assert first != second
        sg.set_seed(12)
        assert draw() != first

    def test_initializers_do_not_touch_torch(self) -> None:
        before = torch.get_rng_state()
        sg.Tensor((4,), random=sg.RandomInitializerType.XAVIER)
        assert torch.equal(torch.get_rng_state(), before)


MEMORY: dict[str, Callable[[np.ndarray], Any]] = {
    "NumPy": lambda values: values,
    "torch": torch.from_numpy,
    "DLPack": OnlyDLPack,
    "bytearray": lambda values: bytearray(values.tobytes()),
    "memoryview of bytes": lambda values: memoryview(bytearray(values.tobytes())),
    "memoryview of floats": memoryview,
    "array.array": lambda values: array.array("f", values.tobytes()),
    "TensorData": sg.TensorData,
}


class WithArray:
    """An object that NumPy can see as an array, as those of data frames are."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values


def as_floats(memory: Any) -> list[float]:
    """What the caller finds in memory that was handed over."""
    if isinstance(memory, OnlyDLPack):
        memory = memory.values
    raw = memory.bytes if isinstance(memory, sg.TensorData) else memory
    return (raw if isinstance(raw, torch.Tensor) else np.frombuffer(raw, np.float32)).reshape(-1).tolist()


class TestMemory:
    @pytest.mark.parametrize("kind", MEMORY)
    def test_data_is_shared_not_copied(self, kind: str) -> None:
        memory = MEMORY[kind](np.array([[1, 2], [3, 4]], np.float32))
        tensor = sg.Tensor((2, 2), data=memory)
        assert tensor.data.tolist() == [[1, 2], [3, 4]]
        tensor.data[0, 1] = 9
        tensor.torch()[1] = 7
        assert as_floats(memory) == [1, 9, 7, 7]

    @pytest.mark.parametrize("kind", MEMORY)
    def test_training_on_the_cpu_writes_into_the_callers_memory(self, kind: str) -> None:
        memory = MEMORY[kind](np.array([2], np.float32))
        x, y = sg.Tensor((1, 1)), sg.Tensor((1, 1))
        layer = sg.FullyConnectedLayer(sg.Tensor((1, 1), data=memory), None, sg.ConvolutionDescriptor(1, 1, 1))
        graph = sg.Graph()
        graph.node(layer, x)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.5))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(CPU)
        training.execute({"x": [3]}, {"y": [5]})
        training.synchronize_updates()
        assert as_floats(memory) == [2 - 0.5 * 2 * (2 * 3 - 5) * 3]

    def test_memory_that_may_not_be_written_is_copied(self) -> None:
        frozen = np.ones(4, np.float32)
        frozen.setflags(write=False)
        for memory in (frozen, frozen.tobytes(), memoryview(frozen)):
            sg.Tensor((4,), data=memory).torch().zero_()
            assert np.frombuffer(memory, np.float32).tolist() == [1] * 4

    @pytest.mark.parametrize(
        "data",
        [
            np.arange(64, dtype=np.float32),
            np.arange(64, dtype=np.float32).tobytes(),
            np.arange(6, dtype=np.float32).reshape(3, 2),
            list(range(5)),
            [[0, 1], [2, 3]],
            np.arange(4, dtype=">f4").reshape(2, 2),
            np.arange(4, dtype=np.float32)[::-1].copy()[::-1],
            np.arange(4, dtype=np.float32).reshape(2, 1, 2),
            np.asfortranarray([[0, 1], [2, 3]], np.float32),
        ],
        ids=["long", "long bytes", "rows", "list", "nested", "big endian", "negative stride", "unit extent", "columns"],
    )
    def test_the_first_values_count_whatever_their_layout(self, data: Any) -> None:
        assert sg.Tensor((2, 2), data=data).data.tolist() == [[0, 1], [2, 3]]

    def test_a_sign_that_torch_only_notes_is_in_the_memory_of_what_is_read(self) -> None:
        noted = torch.complex(torch.zeros(1, 1), torch.ones(1, 1)).conj().imag  # fused kernels read memory
        assert noted.is_neg() and noted.is_contiguous()
        found = buffers.read(noted, (1, 1), sg.DataType.FLOAT32, "x")
        assert not found.is_neg() and found.tolist() == [[-1.0]]

    @pytest.mark.parametrize(
        ("values", "kind", "words"),
        [
            ([1, math.nan], "int64", "nan is not an integer"),
            ([1.0, 2.5], "int32", "2.5 is not an integer"),
            ([math.inf, 1], "uint8", "inf is not an integer from 0 to 255"),
            ([1, 300.0], "int8", "300.0 is not an integer from -128 to 127"),
            ([-1.0, 1], "uint8", "-1.0 is not an integer"),
            ([1, 2.0**63], "int64", "is not an integer"),
            ([1, 256], "uint8", "256 is not an integer"),
            ([0.5, 1], "boolean", "0.5 is neither 0 nor 1"),
            ([math.nan, 1], "boolean", "nan is neither"),
            ([1, 1e39], "float32", "1e.39 is too large"),
            ([1, -70000], "float16", "-70000 is too large"),
            ([1, 1e39], "bfloat16", "1e.39 is too large"),
        ],
    )
    def test_a_number_that_the_type_would_change_is_refused(self, values: list, kind: str, words: str) -> None:
        with pytest.raises(sg.DataTypeError, match=words):
            sg.Tensor((2,), kind, data=values)
        with pytest.raises(sg.ArgumentError, match="cannot hold"):
            sg.Tensor((2,), kind, fill=next(one for one in values if one != 1))

    @pytest.mark.parametrize(
        ("values", "kind", "wanted"),
        [
            ([True, False], "int64", [1, 0]),
            ([3.0, -4], "int8", [3, -4]),
            ([2**63 - 1, -(2**63)], "int64", [2**63 - 1, -(2**63)]),
            ([1, 0.0], "boolean", [True, False]),
            ([math.inf, 0.1], "float64", [math.inf, 0.1]),
            ([], "int64", None),
        ],
    )
    def test_numbers_that_fit_are_taken(self, values: list, kind: str, wanted: list | None) -> None:
        if wanted is None:
            with pytest.raises(sg.DataError, match="too short"):
                sg.Tensor((2,), kind, data=values)
        else:
            assert sg.Tensor((2,), kind, data=values).torch().tolist() == wanted

    MASKED = np.ma.array([[1, 2], [3, 4]], mask=[[0, 0], [1, 0]], dtype=np.float32)

    @pytest.mark.parametrize(
        "data",
        [MASKED, MASKED.astype(np.float64), list(MASKED), [[1, 2], [np.ma.masked, 4]], WithArray(MASKED)],
        ids=["as it is", "of another type", "rows", "elements", "behind __array__"],
    )
    def test_masked_elements_are_refused(self, data: Any) -> None:
        with pytest.raises(sg.DataError, match=r"(?s)masked elements: 1 of .*filled\(value\)"):
            sg.Tensor((2, 2), data=data)
        with pytest.raises(sg.DataError, match="masked elements"):
            sg.TensorData(self.MASKED)

    def test_an_array_in_which_nothing_is_masked_is_an_array(self) -> None:
        whole = np.ma.array([[1, 2], [3, 4]], mask=False, dtype=np.float32)
        for data in (whole, list(whole), np.ma.array(whole, mask=np.ma.nomask)):
            assert sg.Tensor((2, 2), data=data).data.tolist() == [[1, 2], [3, 4]]

    @pytest.mark.parametrize("data", [np.array([1, None]), np.array(["a", "b"]), np.array([1, 2], "datetime64[s]")])
    def test_elements_that_are_no_numbers_are_told(self, data: np.ndarray) -> None:
        for given in (data, WithArray(data)):
            with pytest.raises(sg.DataTypeError, match=r"(?s)holds .* elements, not numbers.*astype"):
                sg.Tensor((2,), data=given)

    def test_bfloat16_takes_numbers_and_shows_them_through_torch(self) -> None:
        tensor = sg.Tensor((2,), "bfloat16", data=[1.5, -2])
        assert (tensor.torch().dtype, tensor.torch().tolist()) == (torch.bfloat16, [1.5, -2])

    @pytest.mark.parametrize(
        ("values", "kind", "valid"),
        [
            ([1, 2], "float32", True),
            ([1, float("nan")], "float32", False),
            ([float("inf"), 1], "float32", False),
            ([1, -float("inf")], "float16", False),
            ([1, 2**40], "int64", True),
        ],
    )
    def test_has_valid_numerics(self, values: list, kind: str, valid: bool) -> None:
        assert sg.Tensor((2,), kind, data=values).has_valid_numerics is valid

    def test_numpy_reads_without_a_copy_unless_asked(self) -> None:
        tensor = sg.Tensor((2,), fill=1.0)
        shared, copied, cast = np.asarray(tensor), np.array(tensor), np.asarray(tensor, np.float64)
        tensor.torch().fill_(5)
        assert (shared.tolist(), copied.tolist(), cast.tolist(), cast.dtype) == ([5, 5], [1, 1], [1, 1], np.float64)

    @pytest.mark.parametrize("read", [torch.from_dlpack, np.from_dlpack])
    def test_dlpack_reads_without_a_copy(self, read: Callable[[Any], Any]) -> None:
        tensor = sg.Tensor((2,), fill=1.0)
        shared = read(tensor)
        tensor.torch().fill_(5)
        assert shared.tolist() == [5, 5]


class TestTensor:
    def test_a_copy_has_its_own_name_over_the_same_memory(self) -> None:
        tensor = sg.Tensor((2,), fill=1.0, label="w")
        tensor.bind_optimizer_data([np.zeros(2, np.float32)])
        tensor.bind_and_write_data(np.zeros(2, np.float32), CPU)
        twin = tensor.copy()
        assert twin.tensor_id > tensor.tensor_id
        assert (twin.label, twin.descriptor, twin.device) == (f"data{twin.tensor_id}", tensor.descriptor, None)
        assert twin.optimizer_data == tensor.optimizer_data
        twin.data[:] = 4
        assert tensor.data.tolist() == [4, 4]
        assert sg.Tensor((2,)).copy().data is None

    @pytest.mark.parametrize(
        "make", [bytearray, lambda n: np.zeros(n, np.uint8), lambda n: torch.zeros(n, dtype=torch.uint8)]
    )
    def test_copying_from_device_memory_fills_what_was_asked_for(self, make: Callable[[int], Any]) -> None:
        tensor = sg.Tensor((2,), data=np.array([1, 2], np.float32))
        whole, half = make(12), make(8)
        tensor.copy_data_from_device_memory(whole, synchronize_with_device=False)
        tensor.copy_data_from_device_memory(half, 4)
        assert np.frombuffer(bytes(whole), np.float32).tolist() == [1, 2, 0]
        assert np.frombuffer(bytes(half), np.float32).tolist() == [1, 0]

    def test_binding_makes_the_callers_memory_the_tensors(self) -> None:
        tensor, memory = sg.Tensor((2,), fill=1.0), np.array([3, 4, 5], np.float32)
        tensor.bind_and_write_data(memory, CPU)
        memory[0] = 8
        assert (tensor.data.tolist(), tensor.numpy().tolist(), tensor.device) == ([8, 4], [8, 4], CPU)

    def test_a_refused_binding_changes_nothing(self) -> None:
        tensor = sg.Tensor((2,), fill=1.0, label="w")
        for data, device, words in (
            (bytearray(4), CPU, "4 bytes for 8 bytes"),
            (np.zeros(2, np.float32), None, "None"),
        ):
            with pytest.raises(sg.StepgraphError, match=words):
                tensor.bind_and_write_data(data, device)
            assert (tensor.data.tolist(), tensor.numpy().tolist(), tensor.device) == ([1, 1], [1, 1], None)

    def test_optimizer_buffers_are_shared_and_can_be_given_with_the_parameter(self) -> None:
        memory = [np.zeros(2, np.float32), bytearray(8)]
        tensor = sg.TensorParameter(sg.Tensor((2,)), memory).tensor
        for one in tensor.optimizer_data:
            one.array(torch.float32).fill_(6)
        assert [np.frombuffer(one, np.float32).tolist() for one in memory] == [[6, 6], [6, 6]]
        assert len(tensor.optimizer_device_data) == 2

    def test_parameters_of_one_tensor_are_one_parameter(self) -> None:
        tensor = sg.Tensor((2,))
        one, other = sg.TensorParameter(tensor), sg.TensorParameter(tensor)
        assert (one.tensor is tensor, one.is_updatable, other.is_updatable) == (True, True, True)
        one.is_updatable = False
        assert other.is_updatable is False

    def test_device_data_handles_stay_the_callers_objects(self) -> None:
        tensor, handles = sg.Tensor((2,)), [sg.TensorOptimizerDeviceData(), sg.TensorOptimizerDeviceData()]
        tensor.bind_optimizer_data([bytearray(8), bytearray(8)], handles)
        assert tensor.optimizer_device_data == handles


class TestTensorData:
    def test_is_a_view_over_the_callers_bytes(self) -> None:
        memory = bytearray(range(8))
        data = sg.TensorData(memory)
        assert (data.length, bytes(data.bytes), repr(data)) == (8, bytes(range(8)), "TensorData(8 bytes)")
        data.bytes[0] = 255
        assert memory[0] == 255

    @pytest.mark.parametrize("memory", [bytearray(), b"", np.zeros(0, np.float32), torch.zeros(0)], ids=repr)
    def test_length_zero_is_accepted(self, memory: Any) -> None:
        assert sg.TensorData(memory).length == 0

    @pytest.mark.parametrize(
        ("memory", "length"),
        [(np.zeros((2, 3)), 48), (torch.zeros(3, dtype=torch.bfloat16), 6), (array.array("h", [1, 2]), 4), (b"abc", 3)],
    )
    def test_length_is_in_bytes(self, memory: Any, length: int) -> None:
        assert sg.TensorData(memory).length == length

    def test_the_deallocator_runs_once_when_nothing_reads_the_memory_any_more(self) -> None:
        calls: list[int] = []
        data = sg.TensorData(bytearray(4), deallocator=lambda: calls.append(1))
        view = data.bytes
        assert calls == []
        del data
        gc.collect()
        assert (calls, view.nbytes) == ([], 4)
        tensor = sg.Tensor((1,), data=sg.TensorData(view, deallocator=lambda: calls.append(2)))
        gc.collect()
        assert calls == [] and tensor.data == 0
        del tensor
        gc.collect()
        assert calls == [2]
        del view
        gc.collect()
        assert calls == [2, 1]


def test_memory_is_the_whole_buffer_behind_the_data() -> None:
    buffer = np.arange(6, dtype=np.float32)
    tensor = sg.Tensor((2, 2), data=sg.TensorData(buffer))
    memory = tensor.memory
    assert memory is not None and memory.length == 24 and bytes(memory.bytes) == buffer.tobytes()
    memory.array(torch.float32)[5] = 9
    assert buffer[5] == 9  # shared
    assert sg.Tensor((2,)).memory is None
    part = sg.Tensor((2,), data=sg.TensorData(buffer[4:]))
    assert part.memory is not None and part.memory.length == 8


def test_parameters_of_one_tensor_are_equal() -> None:
    layer = sg.FullyConnectedLayer.create(3, 2)
    assert layer.weights_parameter == layer.weights_parameter == sg.TensorParameter(layer.weights)
    assert layer.weights_parameter not in (layer.biases_parameter, layer.weights)
    assert len({layer.weights_parameter, sg.TensorParameter(layer.weights)}) == 1


# What only looks like an array


class Raising:
    """Whatever NumPy or DLPack asks of it, it raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise self.error


class RaisingDLPack(Raising):
    def __dlpack__(self, **_: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _nested(**layout: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(2)], **layout)


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.eye(2), 1.0, 0, torch.qint8)


def _compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(2).to_sparse_csr()


LOOKALIKES: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "is sparse_coo, not dense"),
    "compressed": (_compressed, "is sparse_csr, not dense"),
    "nested": (_nested, "is nested, not dense"),
    "jagged": (lambda: _nested(layout=torch.jagged), "is nested, not dense"),
    "quantized": (_quantized, "is quantized, not dense"),
    "meta": (lambda: torch.empty(2, 2, device="meta"), "holds no numbers"),
    "oneDNN": (lambda: torch.eye(2).to_mkldnn(), "is mkldnn, not dense"),
    "an array that raises": (lambda: Raising(ZeroDivisionError()), r"cannot be read as an array \(ZeroDivisionError\)"),
    "DLPack that raises": (lambda: RaisingDLPack(KeyError("x")), "cannot be read as an array"),
    "an operating system": (lambda: RaisingDLPack(OSError(5, "boo")), "cannot be read as an array"),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_what_only_looks_like_an_array_is_refused(kind: str) -> None:
    make, words = LOOKALIKES[kind]
    x = sg.Tensor((2, 2), label="x")
    graph = sg.Graph()
    graph.node(sg.ActivationLayer.relu(), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    for take in (
        lambda: sg.Tensor((2, 2), data=make()),
        lambda: sg.TensorData(make()),
        lambda: inference.execute({"x": make()}),
        lambda: x.bind_and_write_data(make(), CPU),
    ):
        with pytest.raises(sg.DataTypeError, match=f"(?s){words}.*\nFix:"):
            take()
    assert not x.has_data


@pytest.mark.parametrize(
    ("data", "shape"),
    [(np.ones((1, 2), np.float32)[:, 0], (1,)), (np.ones((1, 4, 2), np.float32)[:, :1, 1], (1, 1))],
)
def test_one_element_of_a_larger_array_is_an_array(data: np.ndarray, shape: tuple[int, ...]) -> None:
    """Its strides are the larger array's, though nothing comes after it."""
    assert sg.TensorData(data).length == sg.TensorData(torch.from_numpy(data)).length == 4
    weight, memory = sg.Tensor(shape, data=data), bytearray(4)
    weight.copy_data_from_device_memory(memory)
    assert np.frombuffer(memory, np.float32) == 1
    weight.bind_optimizer_data([data.copy(), data[...]])

    class Scaled(sg.Layer):
        factor: sg.Tensor

        def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
            return x * scope.array(self.factor)

    x, y, graph = sg.Tensor((2, *shape)), sg.Tensor((2, *shape)), sg.Graph()
    graph.node(Scaled(sg.Tensor(shape, data=data)), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=0.5))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    training.execute({"x": np.ones(x.shape, np.float32)}, {"y": np.zeros(x.shape, np.float32)})
    assert data.item() == pytest.approx(0.5)


@pytest.mark.parametrize("source", [{"fill": 0.0}, {"random": sg.RandomInitializerType.UNIFORM}])
@pytest.mark.parametrize("shape", [(2**40, 2**10), (2**62, 2**62), (10**30,)])
def test_too_little_memory_is_told_as_that(shape: tuple[int, ...], source: dict[str, Any]) -> None:
    with pytest.raises(sg.MemoryLimitError, match=r"not enough memory for [\d,]+ bytes.*\nFix: use a smaller shape"):
        sg.Tensor(shape, **source)
    with pytest.raises(sg.ArgumentError, match="fill is 300, which int8 cannot hold"):
        sg.Tensor((2,), "int8", fill=300)
