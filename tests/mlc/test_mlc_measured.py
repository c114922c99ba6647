"""What was measured of the original, at this face; rows that stepgraph decides otherwise are tested as decided."""

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from tests.mlc.kit import CPU, M, data, descriptor, floats, rates, tensor

FLOAT = M.MLCDataTypeFloat32
RELU = M.MLCActivationLayer.reluLayer


def described(shape: Any, kind: int = FLOAT) -> Any:
    return M.MLCTensorDescriptor.descriptorWithShape_dataType_(shape, kind)


# ------------------------------------------------------------------------------------------ tensors and descriptors


def test_tensor_descriptors() -> None:
    made = described([2, 3, 4, 5])
    assert made.stride() == [240, 80, 20, 4] and made.tensorAllocationSizeInBytes() == 480
    assert M.MLCTensorDescriptor.maxTensorDimensions() == 4
    image = M.MLCTensorDescriptor.descriptorWithWidth_height_featureChannelCount_batchSize_(5, 4, 3, 2)
    assert image.shape() == [2, 3, 4, 5] and image.dataType() == FLOAT
    assert image == described([2, 3, 4, 5]) and image.isEqual_(made) and image is not made


@pytest.mark.parametrize("shape", [[1] * 5, [2, 0], None, [], "23", [2, -1], [2.5]])
def test_shapes_that_answer_nil(shape: Any) -> None:
    assert described(shape) is None and M.lastError().code() > 0


@pytest.mark.parametrize("kind", [0, 2, 10, 99, -1, None])
def test_types_without_storage_answer_nil(kind: Any) -> None:
    assert described([2], kind) is None


@pytest.mark.parametrize(("kind", "size"), [(1, 4), (3, 2), (4, 1), (5, 8), (7, 4), (8, 1), (9, 1)])
def test_element_sizes(kind: int, size: int) -> None:
    assert described([3], kind).tensorAllocationSizeInBytes() == 3 * size


def test_convolution_descriptors_of_tensors() -> None:
    kind = M.MLCTensorDescriptor
    weights = (
        kind.convolutionWeightsDescriptorWithWidth_height_inputFeatureChannelCount_outputFeatureChannelCount_dataType_
    )
    assert weights(3, 3, 4, 5, FLOAT).shape() == [1, 20, 3, 3]
    short = kind.convolutionWeightsDescriptorWithInputFeatureChannelCount_outputFeatureChannelCount_dataType_
    assert short(4, 5, FLOAT).shape() == [1, 20, 1, 1]
    assert kind.convolutionBiasesDescriptorWithFeatureChannelCount_dataType_(5, FLOAT).shape() == [1, 5, 1, 1]


def test_sequences() -> None:
    made = M.MLCTensor.tensorWithSequenceLength_featureChannelCount_batchSize_(3, 2, 2)
    assert made.descriptor().shape() == [2, 3, 2] and made.data().length() == 48
    assert made.descriptor().sequenceLengths() == [3, 3] and made.descriptor().batchSizePerSequenceStep() == [2, 2, 2]
    several = M.MLCTensor.tensorWithSequenceLengths_sortedSequences_featureChannelCount_batchSize_randomInitializerType_
    ragged = several([3, 2, 1], True, 2, 1, 0)
    assert ragged.descriptor().shape() == [1, 3, 2] and ragged.descriptor().batchSizePerSequenceStep() == [3, 2, 1]
    assert ragged.data() is None
    assert several([1, 2, 3], True, 2, 3, 1) is None  # not sorted
    rank_2 = M.MLCTensorDescriptor.descriptorWithShape_sequenceLengths_sortedSequences_dataType_
    assert rank_2([2, 3], [3, 2], True, FLOAT) is None


def test_tensor_data() -> None:
    memory = bytearray(16)
    made = M.MLCTensorData.dataWithBytesNoCopy_length_(memory, 12)
    made.bytes()[0] = 7
    assert memory[0] == 7 and made.length() == 12
    assert M.MLCTensorData.dataWithBytesNoCopy_length_(memory, 0).length() == 0
    assert M.MLCTensorData.dataWithBytesNoCopy_length_(memory, 17) is None
    assert M.MLCTensorData.dataWithBytesNoCopy_length_(memory, -1) is None


def test_the_deallocator_runs_when_the_data_goes_away() -> None:
    freed: list[tuple[Any, int]] = []
    memory = bytearray(8)
    made = M.MLCTensorData.dataWithBytesNoCopy_length_deallocator_(memory, 8, lambda *given: freed.append(given))
    assert not freed and made.length() == 8
    del made
    gc.collect()
    assert freed == [(memory, 8)]


def test_names_and_numbers_of_tensors() -> None:
    first, second = tensor([2]), tensor([2])
    assert second.tensorID() == first.tensorID() + 1 and first.label() == f"data{first.tensorID()}"
    first.setLabel_("x")
    assert first.label() == "x"
    first.label = "y"
    assert first.native.label == "y"


def test_a_tensor_without_data() -> None:
    made = tensor([2, 2])
    assert made.data() is None and made.hasValidNumerics() is True and made.device() is None
    assert made.synchronizeData() is True and made.synchronizeOptimizerData() is True
    assert made.optimizerData() == [] and made.optimizerDeviceData() == []
    assert made.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(bytearray(16), 16, False) is False
    assert made.bindAndWriteData_toDevice_(data(np.zeros(3)), CPU) is False
    assert M.MLCTensor.tensorWithDescriptor_(None).descriptor() is None


def test_the_whole_buffer_is_the_data() -> None:
    made = M.MLCTensor.tensorWithShape_data_dataType_([4], data(np.arange(64)), FLOAT)
    assert made.data().length() == 256 and made.data().bytes()[:4] == b"\0\0\0\0"
    assert np.array_equal(floats(made), np.arange(64, dtype=np.float32))
    short = M.MLCTensorData.dataWithBytesNoCopy_length_(bytearray(8), 8)
    assert M.MLCTensor.tensorWithShape_data_dataType_([2, 2], short, FLOAT) is None  # decided: refused
    assert "8 bytes for 16 bytes" in str(M.lastError())


def test_numerics() -> None:
    assert tensor([2], [1, 2]).hasValidNumerics() is True
    assert tensor([2], [1, np.nan]).hasValidNumerics() is False and tensor([2], [1, np.inf]).hasValidNumerics() is False


def test_copies_of_tensors() -> None:
    original = tensor([2], [1, 2])
    assert original.bindOptimizerData_deviceData_([data([3, 4])], None)
    twin = original.copy()
    assert twin.tensorID() > original.tensorID() and twin.label() == f"data{twin.tensorID()}" and twin.device() is None
    assert twin.data() == original.data() and twin.optimizerData() == original.optimizerData()


def test_quantization_as_decided() -> None:
    x = tensor([4], [-1, 0.5, 1, 1000])
    quantized = x.tensorByQuantizingToType_scale_bias_(M.MLCDataTypeInt8, 10.0, 3)
    assert np.frombuffer(quantized.data(), np.int8).tolist() == [-7, 8, 13, 127]
    back = quantized.tensorByDequantizingToType_scale_bias_(FLOAT, tensor([1], 10.0), tensor([1], 3.0))
    assert np.allclose(floats(back), [-1, 0.5, 1, 12.4])
    for kind in (FLOAT, M.MLCDataTypeInt64, M.MLCDataTypeBoolean):
        assert x.tensorByQuantizingToType_scale_bias_(kind, 1.0, 0) is None
    assert (
        quantized.tensorByDequantizingToType_scale_bias_(M.MLCDataTypeInt32, tensor([1], 1.0), tensor([1], 0.0)) is None
    )


def test_initializers_as_decided() -> None:
    M.MLCPlatform.setRNGSeedTo_(5)
    kinds = (
        M.MLCRandomInitializerTypeUniform,
        M.MLCRandomInitializerTypeGlorotUniform,
        M.MLCRandomInitializerTypeXavier,
    )
    uniform, glorot, xavier = (
        floats(M.MLCTensor.tensorWithShape_randomInitializerType_([64, 64], kind)) for kind in kinds
    )
    assert 0 <= uniform.min() < uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
    bound = np.sqrt(6 / 128)
    assert np.abs(glorot).max() <= bound and abs(glorot.std() - bound / np.sqrt(3)) < 0.01
    assert abs(xavier.std() - np.sqrt(2 / 128)) < 0.01
    M.MLCPlatform.setRNGSeedTo_(5)
    assert np.array_equal(floats(M.MLCTensor.tensorWithShape_randomInitializerType_([64, 64], 1)), uniform)


@pytest.mark.parametrize("shape", [[1, 4000, 1, 1], [1, 400, 3, 3]])
def test_initializers_of_packed_weights_keep_the_measured_range(shape: list[int]) -> None:
    M.MLCPlatform.setRNGSeedTo_(5)
    _, samples, height, width = shape
    for kind, bound, deviation in (
        (M.MLCRandomInitializerTypeUniform, 1.0, np.sqrt(1 / 12)),
        (M.MLCRandomInitializerTypeGlorotUniform, np.sqrt(3), 1.0),
        (M.MLCRandomInitializerTypeXavier, np.inf, 0.5),
    ):
        for made in (
            M.MLCTensor.tensorWithShape_randomInitializerType_(shape, kind),
            M.MLCTensor.tensorWithShape_randomInitializerType_dataType_(shape, kind, FLOAT),
            M.MLCTensor.tensorWithDescriptor_randomInitializerType_(
                M.MLCTensorDescriptor.descriptorWithShape_dataType_(shape, FLOAT), kind
            ),
            M.MLCTensor.tensorWithWidth_height_featureChannelCount_batchSize_randomInitializerType_(
                width, height, samples, 1, kind
            ),
        ):
            values = floats(made)
            assert np.abs(values).max() <= bound * (1 + 1e-6)
            assert values.std() == pytest.approx(deviation, rel=0.05)


def test_the_seed() -> None:
    program = (
        "import stepgraph.mlc as M; p = M.MLCPlatform; print(p.getRNGseed()); "
        "[(p.setRNGSeedTo_(s), print(p.getRNGseed())) for s in (42, -7, 0)]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "42", "-7", "0"]


# --------------------------------------------------------------------------------------------------------- devices


def test_devices() -> None:
    assert (CPU.type(), CPU.actualDeviceType(), CPU.gpuDevices()) == (0, 0, [])
    assert M.MLCDevice.aneDevice() is None and M.MLCDevice.deviceWithType_(M.MLCDeviceTypeANE) is None
    any_device = M.MLCDevice.deviceWithType_(M.MLCDeviceTypeAny)
    assert any_device.type() == any_device.actualDeviceType()
    assert (
        M.MLCDevice.deviceWithType_selectsMultipleComputeDevices_(M.MLCDeviceTypeAny, True).type() == any_device.type()
    )
    assert CPU.copy().type() == 0 and CPU.copy() == CPU
    assert M.MLCDevice.alloc().init().type() in (0, 1) and M.MLCDevice.deviceWithType_(4) is None
    if sg.Device.gpu() is None:
        assert M.MLCDevice.gpuDevice() is None and any_device.type() == 0


def test_supported_types() -> None:
    assert not any(M.MLCLayer.supportsDataType_onDevice_(kind, CPU) for kind in (1, 3, 4, 5, 7, 8, 9))
    assert M.MLCConvolutionLayer.supportsDataType_onDevice_(FLOAT, CPU) is True
    assert M.MLCEmbeddingLayer.supportsDataType_onDevice_(FLOAT, CPU) is False
    assert M.MLCEmbeddingLayer.supportsDataType_onDevice_(M.MLCDataTypeInt32, CPU) is True


# ------------------------------------------------------------------------------------------- objects that `new` gives


def test_what_new_gives() -> None:
    made = M.MLCTensor.new()
    assert (made.descriptor(), made.data(), made.label(), made.tensorID()) == (None, None, None, 0)
    assert M.MLCTensorDescriptor.new().shape() is None and M.MLCTensorDescriptor.new().dataType() == 0
    assert M.MLCTensorData.new().length() == 0
    assert M.MLCTensorParameter.new().tensor() is None and M.MLCTensorParameter.new().isUpdatable() is False
    layer = M.MLCLayer.new()
    assert (layer.layerID(), layer.label(), layer.isDebuggingEnabled()) == (0, None, False)
    activation = M.MLCActivationDescriptor.new()
    assert [activation.activationType(), activation.a(), activation.b(), activation.c()] == [0, 0, 0, 0]
    convolution = M.MLCConvolutionDescriptor.new()
    assert [convolution.convolutionType(), convolution.kernelWidth(), convolution.groupCount()] == [0, 1, 1]
    assert [convolution.strideInX(), convolution.paddingPolicy(), convolution.paddingSizeInX()] == [1, 0, 0]
    pooling, loss = M.MLCPoolingDescriptor.new(), M.MLCLossDescriptor.alloc().init()
    assert pooling.poolingType() == pooling.kernelWidth() == pooling.strideInY() == 0
    assert (
        loss.lossType() == M.MLCLossTypeMeanAbsoluteError and loss.reductionType() == loss.weight() == loss.delta() == 0
    )
    assert M.MLCMatMulDescriptor.new().alpha() == 0 and M.MLCEmbeddingDescriptor.new().paddingIndex() is None
    assert M.MLCLSTMDescriptor.new().resultMode() == 0 and M.MLCMultiheadAttentionDescriptor.new().headCount() == 0
    assert M.MLCYOLOLossDescriptor.new().anchorBoxes() is None
    optimizer = M.MLCOptimizer.new()
    assert optimizer.learningRate() == optimizer.gradientClipMax() == 0 and not optimizer.appliesGradientClipping()
    for kind in (M.MLCGraph, M.MLCInferenceGraph, M.MLCTrainingGraph):
        assert kind.new().layers() == [] and kind.graph().layers() == [] and type(kind.graph()) is kind


# ------------------------------------------------------------------------------------------------------ descriptors


def test_pairs_are_height_and_width() -> None:
    kind = M.MLCConvolutionDescriptor
    make = kind.descriptorWithKernelSizes_inputFeatureChannelCount_outputFeatureChannelCount_groupCount_strides_dilationRates_paddingPolicy_paddingSizes_
    made = make([3, 5], 4, 6, 2, [2, 1], [1, 3], M.MLCPaddingPolicyUsePaddingSize, [4, 2])
    assert (made.kernelHeight(), made.kernelWidth(), made.strideInY(), made.strideInX()) == (3, 5, 2, 1)
    assert (made.dilationRateInY(), made.dilationRateInX(), made.paddingSizeInY(), made.paddingSizeInX()) == (
        1,
        3,
        4,
        2,
    )
    short = make([3], 4, 6, 1, None, None, M.MLCPaddingPolicySame, None)
    assert (short.kernelHeight(), short.kernelWidth(), short.strideInX(), short.paddingSizeInY()) == (3, 3, 1, 0)
    depthwise = (
        kind.depthwiseConvolutionDescriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_channelMultiplier_
    )
    assert depthwise(3, 3, 4, 2).outputFeatureChannelCount() == 8 and depthwise(3, 3, 4, 2).groupCount() == 1
    assert depthwise(3, 3, 4, 2).usesDepthwiseConvolution() and not made.isConvolutionTranspose()


def test_pooling_descriptors() -> None:
    plain = M.MLCPoolingDescriptor.poolingDescriptorWithType_kernelSize_stride_(M.MLCPoolingTypeMax, 2, 1)
    assert plain.paddingPolicy() == M.MLCPaddingPolicySame and plain.dilationRateInX() == 1
    make = M.MLCPoolingDescriptor.maxPoolingDescriptorWithKernelSizes_strides_paddingPolicy_paddingSizes_
    made = make([2, 3], None, M.MLCPaddingPolicyValid, None)
    assert (made.strideInY(), made.strideInX()) == (2, 3)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("ReLU", (0, 1, 1)),
        ("Linear", (1, 0, 1)),
        ("HardSigmoid", (0.2, 0.5, 1)),
        ("HardShrink", (0.5, 1, 1)),
        ("SoftShrink", (0.5, 1, 1)),
        ("Tanh", (1, 1, 1)),
        ("GELU", (1, 1, 1)),
    ],
)
def test_defaults_of_activations(kind: str, numbers: tuple[float, float, float]) -> None:
    made = M.MLCActivationDescriptor.descriptorWithType_(getattr(M, f"MLCActivationType{kind}"))
    assert [made.a(), made.b(), made.c()] == [float(np.float32(one)) for one in numbers]
    given = M.MLCActivationDescriptor.descriptorWithType_a_(getattr(M, f"MLCActivationType{kind}"), 0.25)
    assert [given.a(), given.b()] == [0.25, float(np.float32(numbers[1]))]


def test_numbers_of_activation_layers() -> None:
    gelu, shrink = M.MLCActivationLayer.geluLayer().descriptor(), M.MLCActivationLayer.tanhShrinkLayer().descriptor()
    assert np.float32(gelu.a()).tobytes()[::-1].hex() == "3f4c422a"
    assert np.float32(gelu.b()).tobytes()[::-1].hex() == "3d372713" and shrink.a() == 0
    beta = M.MLCActivationLayer.softPlusLayerWithBeta_(2.0).descriptor()
    assert (beta.a(), beta.b()) == (0.5, 2.0) and M.MLCActivationLayer.relu6Layer().descriptor().b() == 6


def test_defaults_of_losses_and_copies() -> None:
    made = M.MLCLossDescriptor.descriptorWithType_reductionType_(M.MLCLossTypeHuber, M.MLCReductionTypeSum)
    assert [made.weight(), made.labelSmoothing(), made.classCount(), made.delta()] == [1, 0, 1, 1]
    assert made.epsilon() == float(np.float32(1e-7)) and made.copy() == made
    assert M.MLCLossDescriptor.descriptorWithType_reductionType_(1, M.MLCReductionTypeMax) is None
    product = M.MLCMatMulDescriptor.descriptorWithAlpha_transposesX_transposesY_(0.5, True, True).copy()
    assert product.transposesX() and product.transposesY()  # the original lost them
    anchors = np.array([1, 2, 4, 3], np.float32)
    yolo = M.MLCYOLOLossDescriptor.descriptorWithAnchorBoxes_anchorBoxCount_(anchors, 2)
    assert np.array_equal(np.frombuffer(yolo.anchorBoxes(), np.float32), anchors)
    assert [yolo.scaleSpatialPositionLoss(), yolo.scaleClassLoss(), yolo.shouldRescore()] == [10, 2, True]
    yolo.setScaleClassLoss_(3.0)
    assert yolo.scaleClassLoss() == 3 and yolo.copy().scaleClassLoss() == 3 and yolo.native.scale_class_loss == 3
    assert M.MLCYOLOLossLayer.layerWithDescriptor_(yolo).label() == "Loss"


@pytest.mark.parametrize("name", ["ActivationType", "LossType", "PoolingType", "ArithmeticOperation", "LSTMResultMode"])
def test_descriptions_of_constants(name: str) -> None:
    known = getattr(sg, name)
    describe = getattr(M, f"MLC{name}DebugDescription")
    assert [describe(int(one)) for one in known] == [one.debug_description for one in known]
    assert describe(500) == describe(-1) == next(iter(known)).debug_description
    assert describe(None) is None


# ----------------------------------------------------------------------------------------------------------- layers


def test_names_of_layers() -> None:
    graph, layer = M.MLCGraph.graph(), RELU()
    assert (layer.layerID(), layer.label(), layer.deviceType()) == (0, "Activation", 2147483647)
    assert graph.nodeWithLayer_source_(layer, tensor([2, 3])) is not None and layer.layerID() == 1
    labels = {"Concatenation": "Concat", "Selection": "Selection", "BatchNormalization": "BatchNorm"}
    assert M.MLCConcatenationLayer.layer().label() == labels["Concatenation"]
    assert M.MLCUpsampleLayer.layerWithShape_([4, 4]).label() == "Upsampling"
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.compileWithOptions_device_(0, CPU) and layer.deviceType() == M.MLCDeviceTypeCPU


def test_unfit_tensors_answer_nil_as_decided() -> None:
    weights = tensor([1, 5, 3, 3], 0.0)
    assert M.MLCConvolutionLayer.layerWithWeights_biases_descriptor_(weights, None, descriptor(2, 2, (3, 3))) is None
    make = M.MLCBatchNormalizationLayer.layerWithFeatureChannelCount_mean_variance_beta_gamma_varianceEpsilon_
    fine, wrong = [tensor([1, 3, 1, 1], 1.0) for _ in range(4)], tensor([1, 4, 1, 1], 1.0)
    assert make(3, *fine, 1e-5).momentum() == float(np.float32(0.99)) and make(3, wrong, *fine[1:], 1e-5) is None
    layer = M.MLCConvolutionLayer.layerWithWeights_biases_descriptor_(
        tensor([1, 4, 3, 3], 0.0), None, descriptor(2, 2, (3, 3))
    )
    assert layer.biases() is None and layer.biasesParameter() is None and layer.weightsParameter().isUpdatable() is True
    assert layer.weightsParameter() == layer.weightsParameter() and layer.weightsParameter().tensor() is layer.weights()


def test_settings_of_layers() -> None:
    assert M.MLCConcatenationLayer.layer().dimension() == 1
    assert M.MLCSoftmaxLayer.layerWithOperation_(M.MLCSoftmaxOperationSoftmax).dimension() == 1
    four = M.MLCPaddingLayer.layerWithZeroPadding_([1, 2, 3, 4])
    assert [four.paddingTop(), four.paddingBottom(), four.paddingLeft(), four.paddingRight()] == [1, 2, 3, 4]
    two = M.MLCPaddingLayer.layerWithZeroPadding_([1, 2]).copy()
    assert [two.paddingTop(), two.paddingBottom(), two.paddingLeft(), two.paddingRight()] == [0, 0, 1, 2]
    assert M.MLCPaddingLayer.layerWithZeroPadding_([]) is M.MLCPaddingLayer.layerWithZeroPadding_([1, 2, 3]) is None
    reduction = M.MLCReductionLayer.layerWithReductionType_dimensions_(M.MLCReductionTypeSum, [2, 1])
    assert reduction.dimension() == 2 and reduction.dimensions() == [2, 1]
    for kind in range(2, 10):
        assert M.MLCScatterLayer.layerWithDimension_reductionType_(0, kind) is None
    assert M.MLCSliceLayer.sliceLayerWithStart_end_stride_([0, 1], [2, 3], None).stride() == [1, 1]
    assert M.MLCSplitLayer.layerWithSplitCount_dimension_(2, 1).splitSectionLengths() is None
    assert M.MLCSplitLayer.layerWithSplitSectionLengths_dimension_([1, 2], 1).splitCount() == 2


def test_lstm_layers() -> None:
    sizes = M.MLCLSTMDescriptor.descriptorWithInputSize_hiddenSize_layerCount_(3, 2, 1)
    inputs = [tensor(shape, 0.1) for shape in ([2, 3], [1, 6, 1, 1], [6], [3, 2])]  # only the count matters
    hidden, biases = [tensor([2, 2], 0.1) for _ in range(4)], [tensor([2], 0.0) for _ in range(4)]
    layer = M.MLCLSTMLayer.layerWithDescriptor_inputWeights_hiddenWeights_biases_(sizes, inputs, hidden, biases)
    names = [M.MLCActivationTypeSigmoid] * 2 + [M.MLCActivationTypeTanh, M.MLCActivationTypeSigmoid]
    assert [one.activationType() for one in layer.gateActivations()] == names
    assert layer.outputResultActivation().activationType() == M.MLCActivationTypeTanh
    assert layer.inputWeights()[0] is inputs[0] and layer.peepholeWeights() is None
    long = M.MLCLSTMLayer.layerWithDescriptor_inputWeights_hiddenWeights_peepholeWeights_biases_gateActivations_outputResultActivation_
    tanh = M.MLCActivationDescriptor.descriptorWithType_(M.MLCActivationTypeTanh)
    assert long(sizes, inputs, hidden, None, biases, [tanh], tanh) is None
    assert long(sizes, inputs, hidden, None, biases, [tanh] * 4, tanh) is not None


# ------------------------------------------------------------------------------------------------------- optimizers


def test_optimizers() -> None:
    zeros = M.MLCOptimizerDescriptor
    make = zeros.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_
    made = make(0.0, 0.0, 0, 0.0)
    assert [made.appliesGradientClipping(), made.gradientClipMax(), made.gradientClipMin()] == [False, 1, -1]
    assert [made.gradientClippingType(), made.maximumClippingNorm(), made.customGlobalNorm()] == [0, 1, 1]
    adam = M.MLCAdamOptimizer.optimizerWithDescriptor_(rates(0.1))
    assert [f"{one:.9g}" for one in (adam.beta1(), adam.beta2(), adam.epsilon())] == [
        "0.899999976",
        "0.999000013",
        "9.99999994e-09",
    ]
    given = M.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_(rates(0.1), 0.1, 0.2, 0.3, 7)
    assert [f"{one:.9g}" for one in (given.beta1(), given.beta2(), given.epsilon())] == [
        "0.100000001",
        "0.200000003",
        "0.300000012",
    ]
    assert given.timeStep() == 7 and given.usesAMSGrad() is False and given.copy().timeStep() == 7
    given.copy().setLearningRate_(5.0)
    assert given.learningRate() == float(np.float32(0.1))
    for kind in (M.MLCSGDOptimizer, M.MLCAdamOptimizer, M.MLCAdamWOptimizer, M.MLCRMSPropOptimizer):
        empty = kind.optimizerWithDescriptor_(None)
        assert empty.learningRate() == empty.gradientClipMax() == empty.customGlobalNorm() == 0
    assert M.MLCRMSPropOptimizer.optimizerWithDescriptor_(None).alpha() == float(np.float32(0.99))
