from fa_inductor.kernels.reference import KERNEL
