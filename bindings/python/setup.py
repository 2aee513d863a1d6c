# SPDX-License-Identifier: Apache-2.0
"""Names the wheel: for every Python 3, since it has no extension module, but for one platform."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class HasLibraries(Distribution):
    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(distclass=HasLibraries, cmdclass={"bdist_wheel": AnyPython})
