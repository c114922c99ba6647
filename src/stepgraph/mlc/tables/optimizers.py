"""Optimizers and their descriptor."""

from __future__ import annotations

import copy
from typing import Any

import stepgraph as sg
from stepgraph.mlc.table import Class, make, native_name, read, reads, unavailable, write
from stepgraph.mlc.values import BOOL, FLOAT, INT, an, one_of, optional

ZEROS = sg.OptimizerDescriptor.exact(
    0.0, gradient_rescale=0.0, gradient_clip_max=0.0, gradient_clip_min=0.0, maximum_clipping_norm=0.0
)
SETTINGS = (
    "gradientRescale gradientClipMax gradientClipMin regularizationScale regularizationType gradientClippingType"
    " maximumClippingNorm customGlobalNorm"
)
RATES: dict[str, Any] = {"learning_rate": FLOAT, "gradient_rescale": FLOAT}
BOUNDS: dict[str, Any] = {"gradient_clip_max": FLOAT, "gradient_clip_min": FLOAT}
PENALTY: dict[str, Any] = {"regularization_type": one_of(sg.RegularizationType), "regularization_scale": FLOAT}
# A nil descriptor sets all ten shared numbers to 0, as measured.
DESCRIPTOR: dict[str, Any] = {"descriptor": optional(an(sg.OptimizerDescriptor), nil=lambda: ZEROS)}
MOMENTS: dict[str, Any] = {"beta1": FLOAT, "beta2": FLOAT, "epsilon": FLOAT}
AMS: dict[str, Any] = {"uses_ams_grad": BOOL, "time_step": INT}
NORM_1 = "customGlobalNorm reads 1, as in the original: it stands in for the computed norm"


@native_name("<class>.exact")
def _exact(**settings: Any) -> sg.OptimizerDescriptor:
    """In the original the flag alone decides; natively, bounds that would be ignored are refused."""
    return sg.OptimizerDescriptor.exact(**settings)


MLC_OPTIMIZER_DESCRIPTOR = Class(
    "MLCOptimizerDescriptor",
    sg.OptimizerDescriptor,
    "NSObject",
    (
        *reads(f"learningRate appliesGradientClipping {SETTINGS}"),
        make(
            "descriptorWithLearningRate:gradientRescale:regularizationType:regularizationScale:",
            _exact,
            **RATES,
            **PENALTY,
            custom_global_norm=1.0,
            note=NORM_1,
        ),
        make(
            "descriptorWithLearningRate:gradientRescale:appliesGradientClipping:gradientClipMax:gradientClipMin:"
            "regularizationType:regularizationScale:",
            _exact,
            **RATES,
            applies_gradient_clipping=BOOL,
            **BOUNDS,
            **PENALTY,
            custom_global_norm=1.0,
            note=NORM_1,
        ),
        make(
            "descriptorWithLearningRate:gradientRescale:appliesGradientClipping:gradientClippingType:gradientClipMax:"
            "gradientClipMin:maximumClippingNorm:customGlobalNorm:regularizationType:regularizationScale:",
            _exact,
            **RATES,
            applies_gradient_clipping=BOOL,
            gradient_clipping_type=one_of(sg.GradientClippingType),
            **BOUNDS,
            maximum_clipping_norm=FLOAT,
            custom_global_norm=FLOAT,
            **PENALTY,
        ),
    ),
    new=lambda: copy.copy(ZEROS),
    copy=copy.copy,
)

MLC_OPTIMIZER = Class(
    "MLCOptimizer",
    sg.Optimizer,
    "NSObject",
    (
        read("learningRate"),
        write("learningRate", FLOAT),
        read("appliesGradientClipping"),
        write("appliesGradientClipping", BOOL),
        *reads(SETTINGS),
        *unavailable(note="all numbers 0; it has no rule, so no training graph takes it"),
    ),
    new=lambda: sg.Optimizer(ZEROS),
    copy=copy.copy,
)

MLC_SGD_OPTIMIZER = Class(
    "MLCSGDOptimizer",
    sg.SGDOptimizer,
    "MLCOptimizer",
    (
        *reads("momentumScale usesNesterovMomentum"),
        make("optimizerWithDescriptor:", **DESCRIPTOR),
        make(
            "optimizerWithDescriptor:momentumScale:usesNesterovMomentum:",
            **DESCRIPTOR,
            momentum_scale=FLOAT,
            uses_nesterov_momentum=BOOL,
        ),
    ),
    new=lambda: sg.SGDOptimizer(ZEROS),
    copy=copy.copy,
)

MLC_ADAM_OPTIMIZER = Class(
    "MLCAdamOptimizer",
    sg.AdamOptimizer,
    "MLCOptimizer",
    (
        *reads("beta1 beta2 epsilon usesAMSGrad timeStep"),
        make("optimizerWithDescriptor:", **DESCRIPTOR),
        make("optimizerWithDescriptor:beta1:beta2:epsilon:timeStep:", **DESCRIPTOR, **MOMENTS, time_step=INT),
        make("optimizerWithDescriptor:beta1:beta2:epsilon:usesAMSGrad:timeStep:", **DESCRIPTOR, **MOMENTS, **AMS),
    ),
    new=lambda: sg.AdamOptimizer(ZEROS),
    copy=copy.copy,
)

MLC_ADAM_W_OPTIMIZER = Class(
    "MLCAdamWOptimizer",
    sg.AdamWOptimizer,
    "MLCOptimizer",
    (
        *reads("beta1 beta2 epsilon usesAMSGrad timeStep"),
        make("optimizerWithDescriptor:", **DESCRIPTOR),
        make("optimizerWithDescriptor:beta1:beta2:epsilon:usesAMSGrad:timeStep:", **DESCRIPTOR, **MOMENTS, **AMS),
    ),
    new=lambda: sg.AdamWOptimizer(ZEROS),
    copy=copy.copy,
)

MLC_RMS_PROP_OPTIMIZER = Class(
    "MLCRMSPropOptimizer",
    sg.RMSPropOptimizer,
    "MLCOptimizer",
    (
        *reads("momentumScale alpha epsilon isCentered"),
        make("optimizerWithDescriptor:", **DESCRIPTOR),
        make(
            "optimizerWithDescriptor:momentumScale:alpha:epsilon:isCentered:",
            **DESCRIPTOR,
            momentum_scale=FLOAT,
            alpha=FLOAT,
            epsilon=FLOAT,
            is_centered=BOOL,
        ),
    ),
    new=lambda: sg.RMSPropOptimizer(ZEROS),
    copy=copy.copy,
)

CLASSES = (
    MLC_OPTIMIZER_DESCRIPTOR,
    MLC_OPTIMIZER,
    MLC_SGD_OPTIMIZER,
    MLC_ADAM_OPTIMIZER,
    MLC_ADAM_W_OPTIMIZER,
    MLC_RMS_PROP_OPTIMIZER,
)
