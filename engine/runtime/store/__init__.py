"""The store of coordination on etcd: a private one or a kept one."""
