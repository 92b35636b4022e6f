"""The parameter server as a library for any MPI program; `adam_mpi.ParameterServer` is its public class."""
