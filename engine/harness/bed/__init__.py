"""A bed of hosts to break: namespaces of this machine, joined by a bridge, with an etcd of three members."""
