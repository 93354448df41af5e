"""Recovery: inventories of workers, the plan that is made from them, and the commit of a step."""
