"""Programs written the way ML Compute's clients are, in orders of calls that nothing here was built for."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.mlc.kit import CPU, M, data, descriptor, floats, rates, tensor

TRAIN = "executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_"
INFER = "executeWithInputsData_batchSize_options_completionHandler_"
WAIT = M.MLCExecutionOptionsSynchronous
DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def device_of(kind: str) -> Any:
    return CPU if kind == "cpu" else M.MLCDevice.gpuDevice()


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def read(source: Any) -> np.ndarray:
    """A tensor's numbers as clients copy them out."""
    memory = np.zeros(source.descriptor().tensorAllocationSizeInBytes() // 4, np.float32)
    copy = source.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_
    assert copy(memory, memory.nbytes, False), M.lastError()
    return memory.reshape(source.descriptor().shape())


# ---------------------------------------------------------------------------------- a training loop over any model


class Model:
    """A tape of dense layers: it keeps no layers of its own, but finds everything again in `training.layers()`."""

    def __init__(self, sizes: list[int], rows: int, device: Any) -> None:
        self.rows, self.device, self.buffers = rows, device, []
        self.graph = M.MLCGraph.graph()
        self.x, self.y = tensor([rows, sizes[0]]), tensor([rows, sizes[-1]])
        value = self.x
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            weights, biases = tensor([1, inputs * outputs, 1, 1]), tensor([1, outputs, 1, 1])
            for one, shape in ((weights, (outputs, inputs)), (biases, (outputs,))):
                self.buffers.append(numbers(*shape, seed=len(self.buffers)) / np.float32(np.sqrt(inputs)))
                assert one.bindAndWriteData_toDevice_(data(self.buffers[-1]), device)
            make = M.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_
            value = self.graph.nodeWithLayer_source_(make(weights, biases, descriptor(inputs, outputs)), value)
            if index < len(sizes) - 2:
                value = self.graph.nodeWithLayer_source_(M.MLCActivationLayer.tanhLayer(), value)
        # The program makes its inference graph first and compiles it last.
        self.inference = M.MLCInferenceGraph.graphWithGraphObjects_([self.graph])
        loss = M.MLCLossLayer.softmaxCrossEntropyLossWithReductionType_labelSmoothing_classCount_weight_(
            M.MLCReductionTypeNone, 0.0, sizes[-1], 1.0
        )
        self.adam = M.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_(
            rates(0.05), 0.9, 0.999, 1e-8, 1
        )
        self.training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([self.graph], loss, self.adam)
        self.last = self.training.layers()[-1]  # before there are labels
        assert isinstance(self.last, M.MLCLossLayer) and self.training.resultTensorsForLayer_(self.last) == []
        named = {"x": self.x}, {"y": self.y}
        assert self.training.addInputs_lossLabels_(*named) and self.training.compileWithOptions_device_(0, device)
        assert self.inference.addInputs_({"x": self.x}) and self.inference.compileWithOptions_device_(0, device)

    def step(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """One loss for each row, read where the loss layer leaves it."""
        run = getattr(self.training, TRAIN)
        assert run({"x": data(x)}, {"y": data(y)}, None, len(x), WAIT, None), M.lastError()
        (losses,) = self.training.resultTensorsForLayer_(self.training.layers()[-1])
        return floats(losses).reshape(-1)[: len(x)].copy()

    def predict(self, x: np.ndarray) -> np.ndarray:
        found: list[np.ndarray] = []
        take = lambda result, error, seconds: found.append(floats(result).reshape(len(x), -1).copy())  # noqa: E731
        assert getattr(self.inference, INFER)({"x": data(x)}, len(x), WAIT, take)
        return found[0]

    def parameters(self) -> list[Any]:
        layers = [one for one in self.training.layers() if isinstance(one, M.MLCFullyConnectedLayer)]
        return [one for layer in layers for one in (layer.weights(), layer.biases())]


def torch_losses(model: Model, batches: list[tuple[np.ndarray, np.ndarray]]) -> tuple[list[np.ndarray], list[Any]]:
    """The same in PyTorch, from the program's own buffers as they were."""
    parameters = [torch.tensor(one).requires_grad_() for one in model.buffers]
    adam, found = torch.optim.Adam(parameters, lr=0.05), []
    for x, y in batches:
        hidden = torch.tanh(F.linear(torch.tensor(x), *parameters[:2]))
        losses = F.cross_entropy(F.linear(hidden, *parameters[2:]), torch.tensor(y), reduction="none")
        adam.zero_grad()
        losses.sum().backward()
        adam.step()
        found.append(losses.detach().numpy())
    return found, parameters


@pytest.mark.parametrize("kind", DEVICES)
def test_a_loop_that_reads_losses_from_the_last_layer(kind: str) -> None:
    model = Model([5, 8, 3], 6, device_of(kind))
    x, y = numbers(22, 5, seed=50), np.eye(3, dtype=np.float32)[np.random.default_rng(51).integers(0, 3, 22)]
    batches = [(x[i : i + 6], y[i : i + 6]) for _ in range(4) for i in range(0, 22, 6)]  # the last has 4 rows
    expected, parameters = torch_losses(model, batches)
    for (rows, labels), losses in zip(batches, expected, strict=True):
        np.testing.assert_allclose(model.step(rows, labels), losses, rtol=2e-4, atol=1e-5)
    assert model.adam.timeStep() == 17
    model.training.synchronizeUpdates()
    for one, mine, theirs in zip(model.parameters(), model.buffers, parameters, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-3, atol=1e-5)  # the program's own memory
        assert np.array_equal(read(one).reshape(-1), mine.reshape(-1))
    with torch.no_grad():
        logits = F.linear(torch.tanh(F.linear(torch.tensor(x[:4]), *parameters[:2])), *parameters[2:])
    np.testing.assert_allclose(model.predict(x[:4]), logits.numpy(), rtol=1e-3, atol=1e-4)


def test_a_run_that_goes_on_in_a_new_graph_from_weights_and_optimizer_state() -> None:
    x, y = numbers(6, 5, seed=52), np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]]
    whole, half = Model([5, 8, 3], 6, CPU), Model([5, 8, 3], 6, CPU)
    moments = [[np.zeros(one.native.descriptor.element_count, np.float32) for _ in "mv"] for one in half.parameters()]
    for one, pair in zip(half.parameters(), moments, strict=True):
        bind = half.training.bindOptimizerData_deviceData_withTensor_
        assert bind([data(array) for array in pair], None, one), M.lastError()
    for _ in range(3):
        assert np.array_equal(whole.step(x, y), half.step(x, y))
    half.training.synchronizeUpdates()
    for one in half.parameters():
        assert one.synchronizeOptimizerData()
    resumed = Model([5, 8, 3], 6, CPU)
    adam = M.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_(
        rates(0.05), 0.9, 0.999, 1e-8, half.adam.timeStep()
    )
    assert resumed.training.compileOptimizer_(adam), M.lastError()
    for one, source, pair in zip(resumed.parameters(), half.parameters(), moments, strict=True):
        saved = bytes(source.data())  # what a file would hold
        assert one.bindAndWriteData_toDevice_(saved, CPU), M.lastError()
        bind = resumed.training.bindOptimizerData_deviceData_withTensor_
        assert bind([data(array.copy()) for array in pair], None, one), M.lastError()
    for _ in range(3):
        assert np.array_equal(whole.step(x, y), resumed.step(x, y))


# ------------------------------------------------------------------------------------------------- style transfer


def convolution(inputs: int, outputs: int, seed: int, stride: int = 1) -> tuple[Any, np.ndarray, np.ndarray]:
    """A 3x3 convolution with valid padding, and its arrays."""
    weights, biases = numbers(outputs, inputs, 3, 3, seed=seed) / 3, numbers(outputs, seed=seed + 1)
    factory = M.MLCConvolutionDescriptor
    settings = (
        factory.descriptorWithKernelSizes_inputFeatureChannelCount_outputFeatureChannelCount_strides_paddingPolicy_paddingSizes_
    )([3, 3], inputs, outputs, [stride, stride], M.MLCPaddingPolicyValid, None)
    make = M.MLCConvolutionLayer.layerWithWeights_biases_descriptor_
    layer = make(tensor([1, outputs * inputs, 3, 3], weights), tensor([1, outputs, 1, 1], biases), settings)
    assert layer is not None, M.lastError()
    return layer, weights, biases


def instance_normalization(channels: int) -> Any:
    make = M.MLCInstanceNormalizationLayer.layerWithFeatureChannelCount_beta_gamma_varianceEpsilon_
    return make(channels, tensor([1, channels, 1, 1], 0.0), tensor([1, channels, 1, 1], 1.0), 1e-5)


class Style:
    """A generator that is trained, a frozen eye, and two losses inside the graph: content and style."""

    def __init__(self, device: Any) -> None:
        self.graph = M.MLCGraph.graph()
        self.x = M.MLCTensor.tensorWithWidth_height_featureChannelCount_batchSize_(8, 8, 3, 2)
        node = self.graph.nodeWithLayer_source_
        self.down, self.up = convolution(3, 4, 1, stride=2), convolution(4, 3, 3)
        self.eye, self.norm = convolution(3, 4, 5), instance_normalization(4)
        value = node(self.down[0], node(M.MLCPaddingLayer.layerWithReflectionPadding_([1]), self.x))
        value = node(M.MLCActivationLayer.reluLayer(), node(self.norm, value))
        value = node(M.MLCUpsampleLayer.layerWithShape_([8, 8]), value)
        value = node(self.up[0], node(M.MLCPaddingLayer.layerWithReflectionPadding_([1, 1, 1, 1]), value))
        self.picture = node(M.MLCActivationLayer.tanhLayer(), value)
        frozen = self.graph.nodeWithLayer_sources_disableUpdate_
        features = node(M.MLCActivationLayer.reluLayer(), frozen(self.eye[0], [self.picture], True))
        gram = node(M.MLCGramMatrixLayer.layerWithScale_(0.125), features)
        self.content_label = tensor(features.descriptor().shape())
        self.style_label = tensor(gram.descriptor().shape())
        mean = M.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_
        self.losses = mean(M.MLCReductionTypeMean, 1.0), mean(M.MLCReductionTypeMean, 3.0)
        self.sgd = M.MLCSGDOptimizer.optimizerWithDescriptor_(rates(0.05))
        # The losses are nodes of the training graph itself: the generator's graph stays without them.
        self.training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([self.graph], None, None)
        attach = self.training.nodeWithLayer_sources_lossLabels_
        self.content = attach(self.losses[0], [features], [self.content_label])
        self.style = attach(self.losses[1], [gram], [self.style_label])
        labels = {"content": self.content_label, "style": self.style_label}
        # Outputs before inputs, the optimizer last.
        assert self.training.addOutputs_({"picture": self.picture, "content": self.content, "style": self.style})
        assert self.training.addInputs_lossLabels_({"x": self.x}, labels)
        assert self.training.compileWithOptions_device_(0, device), M.lastError()
        assert self.training.compileOptimizer_(self.sgd), M.lastError()

    def step(self, x: np.ndarray, content: np.ndarray, style: np.ndarray) -> dict[str, np.ndarray]:
        shape = self.picture.descriptor().shape()
        found = {"picture": np.zeros(shape, np.float32)} | {n: np.zeros(1, np.float32) for n in ("content", "style")}
        run = (
            "executeWithInputsData_lossLabelsData_lossLabelWeightsData_outputsData_batchSize_options_completionHandler_"
        )
        given = {"content": data(content), "style": data(style)}
        outputs = {name: M.MLCTensorData.dataWithBytesNoCopy_length_(a, a.nbytes) for name, a in found.items()}
        assert getattr(self.training, run)({"x": data(x)}, given, None, outputs, 0, WAIT, None), M.lastError()
        return found


def torch_style(style: Style) -> tuple[list[torch.Tensor], Any]:
    """The generator's parameters in PyTorch, and the picture with both losses as a function of them."""
    arrays = [style.down[1], style.down[2], np.zeros(4, np.float32), np.ones(4, np.float32), style.up[1], style.up[2]]
    parameters = [torch.tensor(one).requires_grad_() for one in arrays]
    eye = [torch.tensor(one) for one in style.eye[1:]]

    def run(x: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        w1, b1, beta, gamma, w2, b2 = parameters
        value = F.conv2d(F.pad(torch.tensor(x), (1, 1, 1, 1), mode="reflect"), w1, b1, stride=2)
        value = F.interpolate(F.relu(F.instance_norm(value, weight=gamma, bias=beta, eps=1e-5)), size=(8, 8))
        picture = torch.tanh(F.conv2d(F.pad(value, (1, 1, 1, 1), mode="reflect"), w2, b2))
        features = F.relu(F.conv2d(picture, *eye))
        flat = features.flatten(2)
        return picture, features, 0.125 * flat @ flat.transpose(1, 2)

    return parameters, run


@pytest.mark.parametrize("kind", DEVICES)
def test_a_style_transfer_with_two_losses_and_a_frozen_eye(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # a GPU would round what is compared here
    style = Style(device_of(kind))
    assert style.sgd is style.training.optimizer() and style.training.layers()[-2:] == list(style.losses)
    assert style.training.resultTensorsForLayer_(style.losses[1])[0] is style.style
    assert [one.label() for one in style.graph.layers()].count("Loss") == 0
    parameters, run = torch_style(style)
    x = numbers(2, 3, 8, 8, seed=7)
    content, wanted = numbers(2, 4, 6, 6, seed=8), numbers(2, 4, 1, 4, seed=9)
    losses = []
    for _ in range(4):
        found = style.step(x, content, wanted)
        picture, features, gram = run(x)
        both = F.mse_loss(features, torch.tensor(content)), 3 * F.mse_loss(gram[:, :, None], torch.tensor(wanted))
        np.testing.assert_allclose(found["picture"], picture.detach().numpy(), rtol=1e-3, atol=1e-4)
        for name, loss in zip(("content", "style"), both, strict=True):
            assert found[name].item() == pytest.approx(loss.item(), rel=1e-4)
        gradients = torch.autograd.grad(sum(both), parameters)
        with torch.no_grad():
            for one, gradient in zip(parameters, gradients, strict=True):
                one -= 0.05 * gradient
        losses.append(sum(one.item() for one in both))
    assert losses[-1] < losses[0]
    assert np.array_equal(read(style.eye[0].weights()).ravel(), style.eye[1].ravel())  # frozen
    style.training.synchronizeUpdates()
    assert np.allclose(read(style.up[0].weights()).ravel(), parameters[4].detach().numpy().ravel(), atol=1e-4)


def test_the_generator_alone_runs_on_a_picture_of_its_own_while_it_is_trained() -> None:
    style = Style(CPU)
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([style.graph])
    assert inference.compileWithOptions_device_(0, CPU)  # inputs are found by their labels
    assert inference.addOutputs_({"picture": style.picture})  # an output after compile
    x, content, wanted = numbers(2, 3, 8, 8, seed=7), numbers(2, 4, 6, 6, seed=8), numbers(2, 4, 1, 4, seed=9)
    pictures = []
    for _ in range(2):
        memory = np.zeros((2, 3, 8, 8), np.float32)
        run = inference.executeWithInputsData_outputsData_batchSize_options_completionHandler_
        assert run({style.x.label(): data(x)}, {"picture": data(memory)}, 0, WAIT, None), M.lastError()
        style.step(x, content, wanted)
        pictures.append(memory)
    _, run_torch = torch_style(Style(CPU))
    np.testing.assert_allclose(pictures[0], run_torch(x)[0].detach().numpy(), rtol=1e-3, atol=1e-4)
    assert not np.array_equal(*pictures)


# ------------------------------------------------------------------------------------- a classifier of sequences


class Sentences:
    """Words → embedding → LSTM over their real lengths → the last state → classes; run phase by phase."""

    WORDS, WIDTH, HIDDEN, CLASSES, ROWS, STEPS = 11, 4, 5, 3, 4, 6

    def __init__(self, device: Any) -> None:
        self.device, self.graph = device, M.MLCGraph.graph()
        self.words = tensor([self.ROWS, self.STEPS], kind=M.MLCDataTypeInt32)
        self.lengths = tensor([self.ROWS], kind=M.MLCDataTypeInt32)
        self.y = tensor([self.ROWS, self.CLASSES])
        self.table = numbers(self.WORDS, self.WIDTH, seed=1)
        settings = M.MLCEmbeddingDescriptor.descriptorWithEmbeddingCount_embeddingDimension_(self.WORDS, self.WIDTH)
        embedding = M.MLCEmbeddingLayer.layerWithDescriptor_weights_(
            settings, tensor([1, self.WORDS, 1, self.WIDTH], self.table)
        )
        self.gates = [
            [numbers(*shape, seed=10 * group + gate) / 2 for gate in range(4)]
            for group, shape in enumerate(((5, 4), (5, 5), (5,)))
        ]
        full = M.MLCLSTMDescriptor.descriptorWithInputSize_hiddenSize_layerCount_usesBiases_batchFirst_isBidirectional_returnsSequences_dropout_resultMode_
        described = full(self.WIDTH, self.HIDDEN, 1, True, True, False, True, 0.0, M.MLCLSTMResultModeOutputAndStates)
        make = M.MLCLSTMLayer.layerWithDescriptor_inputWeights_hiddenWeights_biases_
        tensors = [[tensor(list(one.shape), one) for one in group] for group in self.gates]
        self.lstm = make(described, *tensors)
        assert self.lstm is not None, M.lastError()
        vectors = self.graph.nodeWithLayer_source_(embedding, self.words)
        self.output = self.graph.nodeWithLayer_sources_(self.lstm, [vectors, self.lengths])
        assert self.output is not None, M.lastError()
        results = self.graph.resultTensorsForLayer_(self.lstm)
        assert results[0] is self.output and len(results) > 1
        self.state = next(one for one in results[1:] if one.descriptor().shape()[-1] == self.HIDDEN)
        last = self.graph.reshapeWithShape_source_([self.ROWS, self.HIDDEN], self.state)
        self.head = numbers(self.CLASSES, self.HIDDEN, seed=90), numbers(self.CLASSES, seed=91)
        self.dense = M.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(
            *(tensor([1, one.size, 1, 1], one) for one in self.head), descriptor(self.HIDDEN, self.CLASSES)
        )
        self.logits = self.graph.nodeWithLayer_source_(self.dense, last)
        loss = M.MLCLossLayer.softmaxCrossEntropyLossWithReductionType_labelSmoothing_classCount_weight_(
            M.MLCReductionTypeMean, 0.0, self.CLASSES, 1.0
        )
        sgd = M.MLCSGDOptimizer.optimizerWithDescriptor_(rates(0.5))
        self.training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([self.graph], loss, sgd)
        self.named = {"words": self.words, "sortedSequenceLengths": self.lengths, "y": self.y}
        # Data is bound before inputs are declared and before the graph is compiled.
        self.rows = np.random.default_rng(3).integers(0, self.WORDS, (self.ROWS, self.STEPS)).astype(np.int32)
        self.counts = np.array([6, 4, 3, 1], np.int32)
        self.labels = np.eye(3, dtype=np.float32)[[0, 2, 1, 1]]
        assert self.bind(), M.lastError()
        inputs = {name: self.named[name] for name in ("words", "sortedSequenceLengths")}
        assert self.training.addInputs_lossLabels_(inputs, {"y": self.y})
        assert self.training.compileWithOptions_device_(0, device), M.lastError()

    def bind(self) -> bool:
        given = {
            "words": data(self.rows, np.int32),
            "sortedSequenceLengths": data(self.counts, np.int32),
            "y": data(self.labels),
        }
        bind = self.training.bindAndWriteData_forInputs_toDevice_batchSize_synchronous_
        return bind(given, self.named, self.device, self.ROWS, True)


def torch_sentences(one: Sentences) -> tuple[list[torch.Tensor], Any]:
    stacked = [torch.tensor(np.concatenate(group)) for group in one.gates]
    parameters = [torch.tensor(one.table), *stacked, *(torch.tensor(array) for array in one.head)]
    for parameter in parameters:
        parameter.requires_grad_()

    def loss() -> torch.Tensor:
        table, inner, hidden, bias, weights, biases = parameters
        states = []
        for row, count in zip(one.rows, one.counts, strict=True):
            h, c = torch.zeros(1, one.HIDDEN), torch.zeros(1, one.HIDDEN)
            for word in row[:count]:
                gates = F.linear(table[int(word)][None], inner, bias) + F.linear(h, hidden)
                i, f, g, o = gates.chunk(4, 1)  # gates: input, forget, candidate, output
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return F.cross_entropy(F.linear(torch.cat(states), weights, biases), torch.tensor(one.labels))

    return parameters, loss


@pytest.mark.parametrize("kind", DEVICES)
def test_sentences_of_several_lengths_phase_by_phase(kind: str) -> None:
    one = Sentences(device_of(kind))
    parameters, loss = torch_sentences(one)
    got: list[np.ndarray] = []
    for step in range(3):
        assert one.bind()
        take = lambda result, error, seconds: got.append(floats(result).copy())  # noqa: E731
        assert one.training.executeForwardWithBatchSize_options_completionHandler_(0, WAIT, take), M.lastError()
        assert one.training.executeGradientWithBatchSize_options_completionHandler_(0, WAIT, None), M.lastError()
        value = loss()
        gradients = torch.autograd.grad(value, parameters)
        assert got[step].item() == pytest.approx(value.item(), rel=1e-4)
        (same,) = one.training.resultTensorsForLayer_(one.training.layers()[-1])
        assert read(same).item() == got[step].item()
        raw = floats(one.training.gradientDataForParameter_layer_(one.dense.weights(), one.dense))
        np.testing.assert_allclose(raw.reshape(3, 5), gradients[4].numpy(), rtol=1e-3, atol=1e-5)
        hidden = one.training.gradientDataForParameter_layer_(one.lstm.hiddenWeights()[1], one.lstm)
        np.testing.assert_allclose(floats(hidden).reshape(5, 5), gradients[2][5:10].numpy(), rtol=1e-3, atol=1e-5)
        assert one.training.executeOptimizerUpdateWithOptions_completionHandler_(WAIT, None), M.lastError()
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.5 * gradient
    one.training.synchronizeUpdates()
    assert np.allclose(read(one.lstm.inputWeights()[2]), parameters[1][10:15].detach().numpy(), atol=1e-4)
    assert one.training.executeGradientWithBatchSize_options_completionHandler_(0, WAIT, None) is False
    assert "executeForwardWithBatchSize_options_completionHandler_" in M.lastError().localizedDescription()
