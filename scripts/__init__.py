"""The commands of this project. A package, since verl's wheel brings one of the same name, which would come first."""
