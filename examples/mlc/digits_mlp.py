"""The most copied ML Compute sample: 784 → 128 → 10 with a softmax layer *and* softmax cross entropy.

    python examples/mlc/digits_mlp.py

scikit-learn's digits stand in for MNIST, enlarged to 28 × 28. The two softmaxes confine the loss to [1.4612, 2.4612].
Training accuracy is counted from the softmax tensor inside the completion handler; label data is handed over twice as
long as it need be, as the sample did by mistake.
"""

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import stepgraph.mlc as MLCompute

BATCH, EPOCHS, STEPS = 32, 5, 300
GLOROT = MLCompute.MLCRandomInitializerTypeGlorotUniform
SYNCHRONOUS = MLCompute.MLCExecutionOptionsSynchronous


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images of 784 numbers from 0 to 1 and one-hot labels, for training and for testing."""
    images, classes = load_digits(return_X_y=True)
    large = np.kron(images.reshape(-1, 8, 8) / 16, np.ones((3, 3)))
    x = np.pad(large, ((0, 0), (2, 2), (2, 2))).reshape(-1, 784).astype(np.float32)
    y = np.eye(10, dtype=np.float32)[classes]
    order = np.random.default_rng(0).permutation(len(x))  # neighbors were written by one hand
    train, test = order[:1500], order[1500:]
    return x[train], y[train], x[test], y[test]


def dense(inputs: int, outputs: int) -> Any:
    """A fully connected layer; Apple's packed weight shapes hold what [outputs, inputs] would."""
    values = MLCompute.MLCTensor.tensorWithShape_randomInitializerType_([outputs, inputs], GLOROT).data()
    weights = MLCompute.MLCTensor.tensorWithShape_data_dataType_(
        [1, inputs * outputs, 1, 1], values, MLCompute.MLCDataTypeFloat32
    )
    biases = MLCompute.MLCTensor.tensorWithShape_fillWithData_dataType_(
        [1, outputs, 1, 1], 0, MLCompute.MLCDataTypeFloat32
    )
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelSizes_inputFeatureChannelCount_outputFeatureChannelCount_strides_paddingPolicy_paddingSizes_(
        [inputs, outputs], inputs, outputs, None, MLCompute.MLCPaddingPolicySame, None
    )
    return MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, biases, descriptor)


def view(array: np.ndarray, length: int | None = None) -> Any:
    """A batch where it lies; nothing is copied."""
    return MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(array, length or array.nbytes)


class Network:
    """The network, its training graph and its inference graph."""

    def __init__(self, device: Any) -> None:
        self.x, self.y = (MLCompute.MLCTensor.tensorWithShape_(shape) for shape in ([BATCH, 784, 1, 1], [BATCH, 10]))
        graph = MLCompute.MLCGraph.graph()
        hidden = graph.nodeWithLayer_source_(dense(784, 128), self.x)
        hidden = graph.nodeWithLayer_source_(MLCompute.MLCActivationLayer.reluLayer(), hidden)
        hidden = graph.nodeWithLayer_source_(dense(128, 10), hidden)
        self.softmax = graph.nodeWithLayer_source_(
            MLCompute.MLCSoftmaxLayer.layerWithOperation_(MLCompute.MLCSoftmaxOperationSoftmax), hidden
        )
        loss = MLCompute.MLCLossLayer.softmaxCrossEntropyLossWithReductionType_labelSmoothing_classCount_weight_(
            MLCompute.MLCReductionTypeMean, 0, 10, 1
        )
        rates = MLCompute.MLCOptimizerDescriptor.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_
        adam = MLCompute.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_(
            rates(1e-3, 1, MLCompute.MLCRegularizationTypeNone, 0), 0.9, 0.999, 1e-7, 1
        )
        self.training = MLCompute.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, adam)
        assert self.training.addInputs_lossLabels_({"image": self.x}, {"label": self.y})
        assert self.training.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsNone, device)
        self.inference = MLCompute.MLCInferenceGraph.graphWithGraphObjects_([graph])
        assert self.inference.addInputs_({"image": self.x})
        assert self.inference.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsNone, device)
        self.seen = np.zeros((BATCH, 10), np.float32)

    def train(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
        """One step; its loss, and how many images the network had right."""
        found: list[float] = []

        def finished(result: Any, error: Any, seconds: float) -> None:
            assert error is None
            self.softmax.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(
                self.seen, self.seen.nbytes, False
            )
            found.append(np.frombuffer(result.data(), np.float32)[0].item())

        too_long = np.concatenate([labels, labels])  # only the first half belongs to this batch
        assert self.training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
            {"image": view(images)}, {"label": view(too_long)}, None, BATCH, SYNCHRONOUS, finished
        )
        return found[0], int((self.seen.argmax(1) == labels.argmax(1)).sum())

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Classes of a batch."""
        found: list[np.ndarray] = []
        assert self.inference.executeWithInputsData_batchSize_options_completionHandler_(
            {"image": view(images)},
            BATCH,
            SYNCHRONOUS,
            lambda result, error, seconds: found.append(
                np.frombuffer(result.data(), np.float32).reshape(-1, 10).argmax(1)
            ),
        )
        return found[0]


def run(device: Any, steps: int = STEPS) -> dict[str, Any]:
    """Five epochs; accuracies in training and testing, and every loss."""
    MLCompute.MLCPlatform.setRNGSeedTo_(1)
    x, y, test_x, test_y = digits()
    network, generator = Network(device), np.random.default_rng(0)
    losses: list[float] = []
    accuracies: list[float] = []
    for _ in range(EPOCHS):
        right = 0
        for _ in range(steps):
            chosen = generator.permutation(len(x))[:BATCH]
            loss, count = network.train(x[chosen], y[chosen])
            losses.append(loss)
            right += count
        accuracies.append(right / (steps * BATCH))
    whole = len(test_x) // BATCH * BATCH  # the last incomplete batch is dropped, as in the sample
    batches = range(0, whole, BATCH)
    right = sum(int((network.predict(test_x[i : i + BATCH]) == test_y[i : i + BATCH].argmax(1)).sum()) for i in batches)
    return {"losses": losses, "accuracies": accuracies, "test": right / whole, "network": network}


if __name__ == "__main__":
    found = run(MLCompute.MLCDevice.cpuDevice())
    for epoch, accuracy in enumerate(found["accuracies"], start=1):
        print(f"epoch {epoch}   accuracy {accuracy:.4f}   loss {found['losses'][epoch * STEPS - 1]:.4f}")
    print(f"test accuracy {found['test']:.4f}")
