"""Optimizers: one pure update rule each; spellings, groups, clipping and regularization once, in the base class."""

from stepgraph.optimizers.adam import AdamOptimizer as AdamOptimizer, AdamWOptimizer as AdamWOptimizer
from stepgraph.optimizers.base import (
    Optimizer as Optimizer,
    clipping_factor as clipping_factor,
    combined_norm as combined_norm,
)
from stepgraph.optimizers.groups import (
    DECAY_MATRICES_ONLY as DECAY_MATRICES_ONLY,
    FROZEN as FROZEN,
    ParameterGroup as ParameterGroup,
    assigned as assigned,
    require_matches as require_matches,
)
from stepgraph.optimizers.conversion import from_torch as from_torch
from stepgraph.optimizers.lion import LionOptimizer as LionOptimizer
from stepgraph.optimizers.muon import MuonOptimizer as MuonOptimizer
from stepgraph.optimizers.rmsprop import RMSPropOptimizer as RMSPropOptimizer
from stepgraph.optimizers.settings import (
    GradientClippingType as GradientClippingType,
    OptimizerDescriptor as OptimizerDescriptor,
    RegularizationType as RegularizationType,
    in_range as in_range,
    number as number,
)
from stepgraph.optimizers.sgd import SGDOptimizer as SGDOptimizer
