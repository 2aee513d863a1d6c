# Rewrites CUDA grammar as C++: launches, grid constants, shared memory. Keeps line numbers.
s/([a-z_]+)<<<(.*)>>>\(\);/emulated_launch(emulated_grid(\2), \1);/
s/([a-z_]+(<[A-Z]+>)?)<<<(.*)>>>\((.*)\);/emulated_launch(emulated_grid(\3), \1, \4);/
s/const __grid_constant__ (\w+) /const \1 \&/g
s/extern __shared__ (__align__\([0-9]+\) )?(\w+) (\w+)\[\];/\2 *\3 = (\2 *)emulated_shared();/
