from engine.api.run import TrainingRun as TrainingRun
from engine.api.training import dry_run as dry_run
from engine.api.training import train as train
