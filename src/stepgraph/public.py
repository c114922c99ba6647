"""The public names, in the order in which a program uses them."""

from stepgraph.types import (
    DataType as DataType,
    DeviceType as DeviceType,
    ExecutionOptions as ExecutionOptions,
    GraphCompilationOptions as GraphCompilationOptions,
    PaddingPolicy as PaddingPolicy,
    RandomInitializerType as RandomInitializerType,
    ReductionType as ReductionType,
)
from stepgraph.random import get_seed as get_seed, set_seed as set_seed, without_memory as without_memory
from stepgraph.tensors.buffers import TensorData as TensorData
from stepgraph.device import Device as Device
from stepgraph.tensors.extents import BATCH as BATCH
from stepgraph.tensors.tensor import (
    Tensor as Tensor,
    TensorDescriptor as TensorDescriptor,
    TensorOptimizerDeviceData as TensorOptimizerDeviceData,
    TensorParameter as TensorParameter,
)
from stepgraph.layers.layer import Layer as Layer, Scope as Scope, constant as constant, statistic as statistic
from stepgraph.layers.activation import (
    ActivationDescriptor as ActivationDescriptor,
    ActivationLayer as ActivationLayer,
    ActivationType as ActivationType,
)
from stepgraph.layers.arithmetic import ArithmeticLayer as ArithmeticLayer, ArithmeticOperation as ArithmeticOperation
from stepgraph.layers.attention import (
    MultiheadAttentionDescriptor as MultiheadAttentionDescriptor,
    MultiheadAttentionLayer as MultiheadAttentionLayer,
)
from stepgraph.layers.comparison import ComparisonLayer as ComparisonLayer, ComparisonOperation as ComparisonOperation
from stepgraph.layers.convolution import (
    ConvolutionDescriptor as ConvolutionDescriptor,
    ConvolutionLayer as ConvolutionLayer,
    ConvolutionType as ConvolutionType,
)
from stepgraph.layers.dropout import DropoutLayer as DropoutLayer
from stepgraph.layers.embedding import EmbeddingDescriptor as EmbeddingDescriptor, EmbeddingLayer as EmbeddingLayer
from stepgraph.layers.feed_forward import GatedFeedForwardLayer as GatedFeedForwardLayer
from stepgraph.layers.global_pooling import GlobalPoolingLayer as GlobalPoolingLayer
from stepgraph.layers.gru import GRUDescriptor as GRUDescriptor, GRULayer as GRULayer
from stepgraph.layers.indexing import (
    GatherLayer as GatherLayer,
    ScatterLayer as ScatterLayer,
    SelectionLayer as SelectionLayer,
)
from stepgraph.layers.layer_normalization import (
    GroupNormalizationLayer as GroupNormalizationLayer,
    LayerNormalizationLayer as LayerNormalizationLayer,
    RMSNormalizationLayer as RMSNormalizationLayer,
)
from stepgraph.layers.linear import FullyConnectedLayer as FullyConnectedLayer
from stepgraph.layers.computed_loss import ComputedLossLayer as ComputedLossLayer
from stepgraph.layers.loss import LossDescriptor as LossDescriptor, LossLayer as LossLayer, LossType as LossType
from stepgraph.layers.normalization import (
    BatchNormalizationLayer as BatchNormalizationLayer,
    InstanceNormalizationLayer as InstanceNormalizationLayer,
)
from stepgraph.layers.padding import PaddingLayer as PaddingLayer, PaddingType as PaddingType
from stepgraph.layers.pooling import (
    PoolingDescriptor as PoolingDescriptor,
    PoolingLayer as PoolingLayer,
    PoolingType as PoolingType,
)
from stepgraph.layers.products import (
    GramMatrixLayer as GramMatrixLayer,
    MatMulDescriptor as MatMulDescriptor,
    MatMulLayer as MatMulLayer,
)
from stepgraph.layers.recurrent import (
    LSTMDescriptor as LSTMDescriptor,
    LSTMLayer as LSTMLayer,
    LSTMResultMode as LSTMResultMode,
)
from stepgraph.layers.reduction import ReductionLayer as ReductionLayer
from stepgraph.layers.shape import (
    ConcatenationLayer as ConcatenationLayer,
    ReshapeLayer as ReshapeLayer,
    SliceLayer as SliceLayer,
    SplitLayer as SplitLayer,
    TransposeLayer as TransposeLayer,
)
from stepgraph.layers.softmax import SoftmaxLayer as SoftmaxLayer, SoftmaxOperation as SoftmaxOperation
from stepgraph.layers.torch_call import Source as Source
from stepgraph.layers.torch_layer import TorchLayer as TorchLayer
from stepgraph.layers.upsample import SampleMode as SampleMode, UpsampleLayer as UpsampleLayer
from stepgraph.layers.yolo import YOLOLossDescriptor as YOLOLossDescriptor, YOLOLossLayer as YOLOLossLayer
from stepgraph.optimizers import (
    DECAY_MATRICES_ONLY as DECAY_MATRICES_ONLY,
    AdamOptimizer as AdamOptimizer,
    AdamWOptimizer as AdamWOptimizer,
    GradientClippingType as GradientClippingType,
    LionOptimizer as LionOptimizer,
    MuonOptimizer as MuonOptimizer,
    Optimizer as Optimizer,
    OptimizerDescriptor as OptimizerDescriptor,
    ParameterGroup as ParameterGroup,
    RMSPropOptimizer as RMSPropOptimizer,
    RegularizationType as RegularizationType,
    SGDOptimizer as SGDOptimizer,
)
from stepgraph.graph import Graph as Graph
from stepgraph.compiler.ranks.parallel import Parallel as Parallel
from stepgraph.graphs.training import TrainingGraph as TrainingGraph
from stepgraph.graphs.inference import InferenceGraph as InferenceGraph
from stepgraph.runtime.execution import Execution as Execution
from stepgraph.runtime.profile import Profile as Profile
from stepgraph.compiler.memory import MemoryPlan as MemoryPlan
from stepgraph.compiler.ranks.plan import RankPlan as RankPlan
from stepgraph.runtime.world import World as World
from stepgraph.runtime.numerics import NumericsReport as NumericsReport
from stepgraph.fitting.fit import evaluate as evaluate, fit as fit
from stepgraph.fitting.prediction import predict as predict
from stepgraph.fitting.history import History as History
from stepgraph.fitting.callbacks import Callback as Callback, EarlyStopping as EarlyStopping, Moment as Moment
from stepgraph.fitting.logs import CSVLog as CSVLog, TensorBoard as TensorBoard, WeightsAndBiases as WeightsAndBiases
from stepgraph.fitting.finder import LearningRates as LearningRates, find_learning_rate as find_learning_rate
from stepgraph.fitting.metrics import ConfusionMatrix as ConfusionMatrix, TopK as TopK, accuracy as accuracy
from stepgraph.fitting.schedule import (
    ConstantSchedule as ConstantSchedule,
    CosineSchedule as CosineSchedule,
    LinearSchedule as LinearSchedule,
    OneCycleSchedule as OneCycleSchedule,
    PolynomialSchedule as PolynomialSchedule,
    StepSchedule as StepSchedule,
    Warmup as Warmup,
    WarmupCosine as WarmupCosine,
)
from stepgraph.graphs.portable import load as load, save as save
from stepgraph.interop.from_torch import from_torch as from_torch
from stepgraph.interop.imported import Imported as Imported
from stepgraph.interop.weights import (
    load_onnx_weights as load_onnx_weights,
    load_safetensors as load_safetensors,
    save_safetensors as save_safetensors,
)
from stepgraph.checkpoint.files import latest as latest
from stepgraph.checkpoint.restore_report import RestoreReport as RestoreReport
from stepgraph.errors import (
    ArgumentError as ArgumentError,
    CheckpointError as CheckpointError,
    DataError as DataError,
    DataTypeError as DataTypeError,
    DeviceError as DeviceError,
    ExecutionError as ExecutionError,
    RunError as RunError,
    ShapeError as ShapeError,
    StateError as StateError,
    StepgraphError as StepgraphError,
    MemoryLimitError as MemoryLimitError,
    NumericsError as NumericsError,
    StorageError as StorageError,
    UnknownNameError as UnknownNameError,
)
