"""Forecast the costs of a plan before a launch: bytes, collectives, step time.

``forecast(plan, model, batch, hardware="h100")`` runs the real passes on a model without memory and replays a step.
"""

from meshpar.forecasting.api import Forecast, forecast
from meshpar.forecasting.cost import Cost, cost
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.step import Batch, record_step
from meshpar.forecasting.trace import StepMemory as Memory
from meshpar.forecasting.trace import Trace

__all__ = ["Batch", "Cost", "Forecast", "Hardware", "Memory", "Trace", "cost", "forecast", "record_step"]
