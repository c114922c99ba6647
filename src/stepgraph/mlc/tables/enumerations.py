"""Enumerations, their constants and the functions that describe them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import stepgraph as sg
from stepgraph.mlc.table import snake

# Swift's names that do not follow from the constant's.
_SWIFT = {"ReLU": "relu", "ReLUN": "relun", "UInt8": "uint8", "UsePaddingSize": "sized(y:x:)", "Invalid": "–"}


class Enumeration(NamedTuple):
    """An enumeration: its native type, and its constants without their common prefix.

    `ReLU=RELU` names stepgraph's member where it is not the constant in SNAKE_CASE; `Invalid=0` has only a raw value.
    """

    name: str
    native: Any
    constants: str
    is_described: bool = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each constant without its prefix, and stepgraph's member or a raw value."""
        found = (one.partition("=") for one in self.constants.split())
        return [(suffix, member or snake(suffix).upper()) for suffix, _, member in found]

    def values(self) -> dict[str, int]:
        """Raw values by the constants' full names."""
        return {
            f"{self.name}{suffix}": int(member) if member.isdigit() else int(self.native[member])
            for suffix, member in self.pairs
        }

    def swift(self, suffix: str) -> str:
        """Swift's name of a constant."""
        if suffix == "None" and self.name.endswith("Options"):
            return "[]"
        head = re.match(r"[A-Z]+(?=[A-Z][a-z]|$|\d)|[A-Z]", suffix)
        assert head is not None
        case = _SWIFT.get(suffix, suffix[: head.end()].lower() + suffix[head.end() :])
        return case if case == "–" else f"{self.name}.{case}"


ENUMERATIONS = (
    Enumeration(
        "MLCActivationType",
        sg.ActivationType,
        "None ReLU=RELU Linear Sigmoid HardSigmoid Tanh Absolute SoftPlus SoftSign ELU ReLUN=RELUN LogSigmoid SELU CELU"
        " HardShrink SoftShrink TanhShrink Threshold GELU HardSwish Clamp",
        is_described=True,
    ),
    Enumeration(
        "MLCArithmeticOperation",
        sg.ArithmeticOperation,
        "Add Subtract Multiply Divide Floor Round Ceil Sqrt Rsqrt Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh"
        " Atanh Pow Exp Exp2 Log Log2 MultiplyNoNaN=MULTIPLY_NO_NAN DivideNoNaN=DIVIDE_NO_NAN Min Max",
        is_described=True,
    ),
    Enumeration(
        "MLCComparisonOperation",
        sg.ComparisonOperation,
        "Equal NotEqual Less Greater LessOrEqual GreaterOrEqual LogicalAND LogicalOR LogicalNOT LogicalNAND LogicalNOR"
        " LogicalXOR",
        is_described=True,
    ),
    Enumeration("MLCConvolutionType", sg.ConvolutionType, "Standard Transposed Depthwise", is_described=True),
    Enumeration("MLCDataType", sg.DataType, "Invalid=0 Float32 Float16 Boolean Int64 Int32 Int8 UInt8=UINT8"),
    Enumeration("MLCDeviceType", sg.DeviceType, "CPU GPU Any ANE"),
    Enumeration(
        "MLCExecutionOptions",
        sg.ExecutionOptions,
        "None SkipWritingInputDataToDevice Synchronous Profiling ForwardForInference PerLayerProfiling",
    ),
    Enumeration("MLCGradientClippingType", sg.GradientClippingType, "ByValue ByNorm ByGlobalNorm", is_described=True),
    Enumeration(
        "MLCGraphCompilationOptions",
        sg.GraphCompilationOptions,
        "None DebugLayers DisableLayerFusion LinkGraphs ComputeAllGradients",
    ),
    Enumeration("MLCLSTMResultMode", sg.LSTMResultMode, "Output OutputAndStates", is_described=True),
    Enumeration(
        "MLCLossType",
        sg.LossType,
        "MeanAbsoluteError MeanSquaredError SoftmaxCrossEntropy SigmoidCrossEntropy CategoricalCrossEntropy Hinge Huber"
        " CosineDistance Log",
        is_described=True,
    ),
    Enumeration("MLCPaddingPolicy", sg.PaddingPolicy, "Same Valid UsePaddingSize", is_described=True),
    Enumeration("MLCPaddingType", sg.PaddingType, "Zero Reflect Symmetric Constant", is_described=True),
    Enumeration("MLCPoolingType", sg.PoolingType, "Max Average L2Norm", is_described=True),
    Enumeration("MLCRandomInitializerType", sg.RandomInitializerType, "Invalid=0 Uniform GlorotUniform Xavier"),
    Enumeration(
        "MLCReductionType",
        sg.ReductionType,
        "None Sum Mean Max Min ArgMax ArgMin L1Norm Any All",
        is_described=True,
    ),
    Enumeration("MLCRegularizationType", sg.RegularizationType, "None L1 L2"),
    Enumeration("MLCSampleMode", sg.SampleMode, "Nearest Linear", is_described=True),
    Enumeration("MLCSoftmaxOperation", sg.SoftmaxOperation, "Softmax LogSoftmax", is_described=True),
)
