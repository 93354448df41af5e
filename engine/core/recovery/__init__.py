"""Recovery: inventories of workers, the plan made from them, and the commit of a step."""
