"""Measurements that compare this project with the code it replaces. They only print; tests enforce what must hold."""
