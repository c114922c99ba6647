"""The drawing classifier of an Apple library, as it drives ML Compute: three convolutions, two dense layers.

    python examples/mlc/drawing_classifier.py

- weights live in the caller's arrays, wrapped as "immutable, no copy"; after `synchronizeUpdates` they hold what was learned;
- the loss is not reduced: one number for each drawing, weighted drawing by drawing;
- training and inference are queued one after the other without waiting, and inference sees the new weights;
- the softmax is a node of the inference graph alone;
- the learning rate is changed between steps.
"""

import itertools
import threading
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import stepgraph.mlc as MLCompute

FLOAT = MLCompute.MLCDataTypeFloat32
CHANNELS = (1, 16, 32, 64)


def first_weights(classes: int, seed: int = 86) -> dict[str, np.ndarray]:
    """Uniform weights and zero biases, the same for the same seed."""
    generator = np.random.default_rng(seed)

    def uniform(shape: tuple[int, ...], fan_in: int, fan_out: int) -> np.ndarray:
        bound = np.sqrt(3 / (0.5 * fan_in + 0.5 * fan_out))
        return generator.uniform(-bound, bound, shape).astype(np.float32)

    found = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(CHANNELS)):
        found[f"conv{i}_weight"] = uniform((outputs, inputs, 3, 3), 9 * inputs, 9 * outputs)
        found[f"conv{i}_bias"] = np.zeros(outputs, np.float32)
    for i, (inputs, outputs) in enumerate(((576, 128), (128, classes))):
        found[f"dense{i}_weight"] = uniform((outputs, inputs), inputs, outputs)
        found[f"dense{i}_bias"] = np.zeros(outputs, np.float32)
    return found


def immutable(array: np.ndarray) -> Any:
    """The caller's memory, promised not to change under the framework's hands."""
    return MLCompute.MLCTensorData.dataWithImmutableBytesNoCopy_length_(array, array.nbytes)


class DrawingClassifier:
    """The network over the caller's weights, with its training graph and its inference graph."""

    def __init__(self, weights: dict[str, np.ndarray], batch: int, classes: int, device: Any) -> None:
        self.weights, self.batch, self.classes = weights, batch, classes
        self.input = MLCompute.MLCTensor.tensorWithWidth_height_featureChannelCount_batchSize_(28, 28, 1, batch)
        shape = [batch, classes, 1, 1]
        self.labels = MLCompute.MLCTensor.tensorWithShape_dataType_(shape, FLOAT)
        self.label_weights = MLCompute.MLCTensor.tensorWithShape_fillWithData_dataType_(shape, 0, FLOAT)
        graph = MLCompute.MLCGraph.graph()
        x = self.input
        for i, (inputs, outputs) in enumerate(itertools.pairwise(CHANNELS)):
            x = graph.nodeWithLayer_source_(self._convolution(i, inputs, outputs), x)
            x = graph.nodeWithLayer_source_(self._relu(), x)
            x = graph.nodeWithLayer_source_(self._pooling(), x)
        x = graph.reshapeWithShape_source_([batch, 576, 1, 1], x)
        x = graph.nodeWithLayer_source_(self._dense(0, 576, 128), x)
        x = graph.nodeWithLayer_source_(self._relu(), x)
        x = graph.nodeWithLayer_source_(self._dense(1, 128, classes), x)
        self.training = self._training_graph(graph)
        assert self.training.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsNone, device)
        self.inference = MLCompute.MLCInferenceGraph.graphWithGraphObjects_([graph])
        softmax = MLCompute.MLCSoftmaxLayer.layerWithOperation_(MLCompute.MLCSoftmaxOperationSoftmax)
        assert self.inference.nodeWithLayer_source_(softmax, x)
        assert self.inference.addInputs_({self.input.label(): self.input})
        assert self.inference.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsNone, device)
        self.graph, self.finished = graph, threading.Semaphore(0)

    def _tensor(self, name: str, descriptor: Any) -> Any:
        return MLCompute.MLCTensor.tensorWithDescriptor_data_(descriptor, immutable(self.weights[name]))

    def _biases(self, name: str, count: int) -> Any:
        make = MLCompute.MLCTensorDescriptor.convolutionBiasesDescriptorWithFeatureChannelCount_dataType_
        return self._tensor(f"{name}_bias", make(count, FLOAT))

    def _convolution(self, i: int, inputs: int, outputs: int) -> Any:
        descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelSizes_inputFeatureChannelCount_outputFeatureChannelCount_strides_paddingPolicy_paddingSizes_(
            [3, 3], inputs, outputs, [1, 1], MLCompute.MLCPaddingPolicySame, None
        )
        make = MLCompute.MLCTensorDescriptor.convolutionWeightsDescriptorWithWidth_height_inputFeatureChannelCount_outputFeatureChannelCount_dataType_
        weights = self._tensor(f"conv{i}_weight", make(3, 3, inputs, outputs, FLOAT))
        return MLCompute.MLCConvolutionLayer.layerWithWeights_biases_descriptor_(
            weights, self._biases(f"conv{i}", outputs), descriptor
        )

    def _dense(self, i: int, inputs: int, outputs: int) -> Any:
        descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
            1, 1, inputs, outputs
        )
        make = MLCompute.MLCTensorDescriptor.convolutionWeightsDescriptorWithInputFeatureChannelCount_outputFeatureChannelCount_dataType_
        weights = self._tensor(f"dense{i}_weight", make(inputs, outputs, FLOAT))
        return MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(
            weights, self._biases(f"dense{i}", outputs), descriptor
        )

    def _relu(self) -> Any:
        descriptor = MLCompute.MLCActivationDescriptor.descriptorWithType_a_(MLCompute.MLCActivationTypeReLU, 0)
        return MLCompute.MLCActivationLayer.layerWithDescriptor_(descriptor)

    def _pooling(self) -> Any:
        return MLCompute.MLCPoolingLayer.layerWithDescriptor_(
            MLCompute.MLCPoolingDescriptor.maxPoolingDescriptorWithKernelSizes_strides_paddingPolicy_paddingSizes_(
                [2, 2], [2, 2], MLCompute.MLCPaddingPolicyValid, None
            )
        )

    def _training_graph(self, graph: Any) -> Any:
        loss = MLCompute.MLCLossLayer.softmaxCrossEntropyLossWithReductionType_labelSmoothing_classCount_weights_(
            MLCompute.MLCReductionTypeNone, 0, self.classes, self.label_weights
        )
        rates = MLCompute.MLCOptimizerDescriptor.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_
        adam = MLCompute.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_(
            rates(1e-3, 1, MLCompute.MLCRegularizationTypeNone, 1), 0.9, 0.999, 1e-8, 1
        )
        training = MLCompute.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, adam)
        assert training.addInputs_lossLabels_lossLabelWeights_(
            {self.input.label(): self.input},
            {self.labels.label(): self.labels},
            {self.label_weights.label(): self.label_weights},
        )
        return training

    def step(self, images: np.ndarray, classes: np.ndarray, importance: np.ndarray) -> tuple[list[Any], list[Any]]:
        """Queues a training step and an inference on the same drawings; lists that the handlers fill."""
        one_hot = np.eye(self.classes, dtype=np.float32)[classes]
        repeated = np.repeat(importance.astype(np.float32), self.classes)
        losses: list[Any] = []
        probabilities: list[Any] = []

        def trained(result: Any, error: Any, seconds: float) -> None:
            losses.append(self._floats(result, self.batch) if error is None else error)
            self.finished.release()

        def inferred(result: Any, error: Any, seconds: float) -> None:
            numbers = self._floats(result, self.batch * self.classes)
            probabilities.append(numbers.reshape(self.batch, self.classes))
            self.finished.release()

        drawings = {self.input.label(): immutable(images)}
        assert self.training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
            drawings,
            {self.labels.label(): immutable(one_hot)},
            {self.label_weights.label(): immutable(repeated)},
            self.batch,
            MLCompute.MLCExecutionOptionsNone,
            trained,
        )
        assert self.inference.executeWithInputsData_batchSize_options_completionHandler_(
            drawings, self.batch, MLCompute.MLCExecutionOptionsNone, inferred
        )
        return losses, probabilities

    def wait(self) -> None:
        """Returns when both handlers of a step have run; on a GPU they run later than the calls return."""
        for _ in range(2):
            self.finished.acquire()

    def _floats(self, tensor: Any, count: int) -> np.ndarray:
        numbers = np.zeros(count, np.float32)
        assert tensor.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(numbers, numbers.nbytes, False)
        return numbers

    def set_learning_rate(self, rate: float) -> None:
        """Takes effect in the next step."""
        self.training.optimizer().setLearningRate_(rate)


def drawings(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits as drawings of 28 × 28, and their classes."""
    images, classes = load_digits(return_X_y=True)
    large = np.kron(images[:count].reshape(-1, 8, 8) / 16, np.ones((3, 3)))
    return np.pad(large, ((0, 0), (2, 2), (2, 2)))[:, None].astype(np.float32), classes[:count]


if __name__ == "__main__":
    batch = 64
    weights = first_weights(10)
    classifier = DrawingClassifier(weights, batch, 10, MLCompute.MLCDevice.alloc().init())
    images, classes = drawings(1024)
    for epoch in range(3):
        classifier.set_learning_rate(1e-3 / (1 + epoch))
        right, losses = 0, []
        for first in range(0, len(images), batch):
            wanted = classes[first : first + batch]
            loss, found = classifier.step(images[first : first + batch], wanted, np.ones(batch))
            classifier.wait()
            right += int((found[0].argmax(1) == wanted).sum())
            losses.append(loss[0].mean())
        classifier.training.synchronizeUpdates()  # `weights` holds what was learned
        print(f"epoch {epoch + 1}   loss {np.mean(losses):.4f}   accuracy {right / len(images):.4f}")
