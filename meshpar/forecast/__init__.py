"""What a plan will cost before anything is launched: bytes, collectives, step time.

``forecast(plan, model, batch, hardware="h100")`` runs the real passes on a model without memory and replays a step.
"""

from meshpar.forecast.api import Forecast, forecast
from meshpar.forecast.cost import Cost, cost
from meshpar.forecast.hardware import Hardware
from meshpar.forecast.step import Batch, record_step
from meshpar.forecast.trace import Memory, Trace

__all__ = ["Batch", "Cost", "Forecast", "Hardware", "Memory", "Trace", "cost", "forecast", "record_step"]
