"""The folders of the hosts of one run, and the folder that is made of them."""
