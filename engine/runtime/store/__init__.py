"""The coordinator's store on etcd: a private one for a run, or an external one."""
