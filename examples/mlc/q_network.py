"""Deep Q-learning with a two-input network: how much to train, how much to rest.

    python examples/mlc/q_network.py

`fitness` and `fatigue` are concatenated along the default dimension, a leaky ReLU (slope 0.3) sits between two dense
layers, the loss is the mean squared error to targets that Python computes from the network's own predictions.
"""

from typing import Any

import numpy as np

import stepgraph.mlc as MLCompute

FLOAT = MLCompute.MLCDataTypeFloat32
SYNCHRONOUS = MLCompute.MLCExecutionOptionsSynchronous
HIDDEN, DISCOUNT, CURIOSITY = 100, 0.7, 0.2
WORKOUT = 0


def step(fitness: float, fatigue: float, action: int) -> tuple[float, float, float, bool]:
    """The environment: next state, reward, and whether the episode is over."""
    fitness, fatigue = (fitness + 100, fatigue + 100) if action == WORKOUT else (fitness, fatigue - 100)
    if fatigue >= 300:
        fitness = fatigue = 0
    if fitness >= 1000:
        return fitness, fatigue, 1.0, True
    if fatigue < -500:
        return fitness, 0, -1.0, True
    return fitness, fatigue, -0.1, False


def data(numbers: Any) -> Any:
    """Numbers as bytes and a length."""
    array = np.array(numbers, np.float32)
    return MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(array, array.nbytes)


def dense(inputs: int, outputs: int) -> Any:
    """A dense layer with rank-2 tensors and Glorot weights."""
    glorot = MLCompute.MLCRandomInitializerTypeGlorotUniform
    weights = MLCompute.MLCTensor.tensorWithShape_randomInitializerType_dataType_([outputs, inputs], glorot, FLOAT)
    biases = MLCompute.MLCTensor.tensorWithShape_fillWithData_dataType_([1, outputs], 0, FLOAT)
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        outputs, inputs, inputs, outputs
    )
    return MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, biases, descriptor)


class QNetwork:
    """Values of the two actions in a state; `update` moves them towards targets."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        uniform = MLCompute.MLCRandomInitializerTypeUniform
        make = MLCompute.MLCTensor.tensorWithShape_randomInitializerType_dataType_
        self.inputs = {"fitness": make([1, 1], uniform, FLOAT), "fatigue": make([1, 1], uniform, FLOAT)}
        self.target = MLCompute.MLCTensor.tensorWithShape_dataType_([1, 2], FLOAT)
        graph = MLCompute.MLCGraph.graph()
        self.joined = graph.nodeWithLayer_sources_(MLCompute.MLCConcatenationLayer.layer(), list(self.inputs.values()))
        hidden = graph.nodeWithLayer_source_(dense(2, HIDDEN), self.joined)
        leaky = MLCompute.MLCActivationDescriptor.descriptorWithType_a_(MLCompute.MLCActivationTypeReLU, 0.3)
        self.leaky = MLCompute.MLCActivationLayer.layerWithDescriptor_(leaky)
        hidden = graph.nodeWithLayer_source_(self.leaky, hidden)
        graph.nodeWithLayer_source_(dense(HIDDEN, 2), hidden)
        loss = MLCompute.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_(MLCompute.MLCReductionTypeMean, 1)
        rates = MLCompute.MLCOptimizerDescriptor.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_
        adam = MLCompute.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_(
            rates(learning_rate, 1, MLCompute.MLCRegularizationTypeNone, 0), 0.9, 0.999, 1e-7, 1
        )
        device = MLCompute.MLCDevice.alloc().init()
        self.training = MLCompute.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, adam)
        assert self.training.addInputs_lossLabels_(self.inputs, {"target": self.target})
        assert self.training.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsNone, device)
        self.inference = MLCompute.MLCInferenceGraph.graphWithGraphObjects_([graph])
        assert self.inference.addInputs_(self.inputs)
        assert self.inference.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsDebugLayers, device)

    def predict(self, state: tuple[float, float]) -> np.ndarray:
        """Values of the actions; a state is given in hundreds, which suits the weights."""
        found: list[np.ndarray] = []

        def finished(result: Any, error: Any, seconds: float) -> None:
            values = np.zeros(2, np.float32)
            assert result.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(values, values.nbytes, False)
            found.append(values)

        given = {"fitness": data([state[0] / 100]), "fatigue": data([state[1] / 100])}
        assert self.inference.executeWithInputsData_batchSize_options_completionHandler_(
            given, 1, SYNCHRONOUS, finished
        )
        return found[0]

    def update(self, state: tuple[float, float], target: np.ndarray) -> float:
        """One step towards the target; the loss before it."""
        found: list[float] = []

        def finished(result: Any, error: Any, seconds: float) -> None:
            number = np.zeros(1, np.float32)
            assert result.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(number, number.nbytes, False)
            found.append(number[0].item())

        given = {"fitness": data([state[0] / 100]), "fatigue": data([state[1] / 100])}
        assert self.training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
            given, {"target": data(target)}, None, 1, SYNCHRONOUS, finished
        )
        return found[0]


def target(network: QNetwork, state: tuple[float, float], action: int) -> tuple[np.ndarray, tuple[float, float], bool]:
    """What the network should have said: the reward, and what it expects to follow."""
    values = network.predict(state)
    fitness, fatigue, reward, over = step(*state, action)
    values[action] = reward + (0 if over else DISCOUNT * network.predict((fitness, fatigue)).max())
    return values, (fitness, fatigue), over


def learn(updates: int, seed: int = 0) -> dict[str, Any]:
    """Plays and learns; the loss on a set of targets that are frozen before, and after."""
    MLCompute.MLCPlatform.setRNGSeedTo_(seed)
    network, generator = QNetwork(), np.random.default_rng(seed)
    states = [(100.0 * generator.integers(0, 10), 100.0 * generator.integers(-4, 3)) for _ in range(32)]
    frozen = [(state, target(network, state, int(generator.integers(2)))[0]) for state in states]

    def error() -> float:
        return float(np.mean([np.square(network.predict(state) - wanted).mean() for state, wanted in frozen]))

    before, losses, state = error(), [], (0.0, 0.0)
    for i in range(updates):
        losses.append(network.update(*frozen[i % len(frozen)]))
        curious = generator.random() < CURIOSITY  # beside the frozen set, the game goes on
        action = int(generator.integers(2)) if curious else int(network.predict(state).argmax())
        _, state, over = target(network, state, action)
        state = (0.0, 0.0) if over else state
    return {"before": before, "after": error(), "losses": losses, "network": network}


if __name__ == "__main__":
    found = learn(200)
    print(f"loss on frozen targets: {found['before']:.4f} before, {found['after']:.4f} after 200 updates")
