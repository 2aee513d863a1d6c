/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of constants: files that are read and refused, and groups that run with any of them. */
#if EP_WITH_CUDA

#include "runtime/cuda/tuning.h"
#include "runtime/cuda/cuda.h"
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

static const EpTuningKey h200 = {
    .gpu = "NVIDIA H200", .capability = 90, .gpus = 4, .links = EP_LINKS_NVLINK};

/* Write a file for `key`, with the first `find` replaced; "": cut off there if NULL replaces it. */
static const char *write_table(const EpTuningKey *key, const char *find, const char *replace) {
    static char text[EP_TUNING_BYTES];
    const char *path = temporary_file();
    FILE *file = fopen(path, "w");
    CHECK(ep_tuning_write(&ep_tuning_hopper, key, text, sizeof(text)) < sizeof(text), "no room");
    char *at = strstr(text, find);
    REQUIRE(file && at, "no file, or no '%s' in it", find);
    fprintf(file, "%.*s%s%s", (int)(at - text), text, replace ? replace : "",
            replace ? at + strlen(find) : "");
    fclose(file);
    return path;
}

static EpStatus read_table(const char *path, EpTuning *out, int *fits) {
    *out = (EpTuning){.pass_us = -1}, *fits = -1;
    return ep_tuning_read(path, &h200, out, fits);
}

SoloTest(runtime_tuning, written_and_read) {
    EpTuning out;
    int fits;
    const char *path = write_table(&h200, "\npass_us = 2.5\n", "\n  pass_us=7.25 # slower\n\n");
    REQUIRE_OK(read_table(path, &out, &fits));
    CHECK(fits && out.pass_us == 7.25, "%d, %g", fits, out.pass_us);
    out.pass_us = ep_tuning_hopper.pass_us;
    CHECK(memcmp(&out, &ep_tuning_hopper, sizeof(out)) == 0, "another constant differs");
    /* Constants that a file leaves out stay. */
    REQUIRE_OK(read_table(write_table(&h200, "\npass_us = 2.5\n", "\n"), &out, &fits));
    CHECK(out.pass_us == -1 && out.token_us == ep_tuning_hopper.token_us, "%g", out.pass_us);
    /* One for other links or for more GPUs is right, but not used. */
    static const char *const others[][2] = {{"gpus = 4", "gpus = 8"}, {"= nvlink", "= peer"}};
    for (int i = 0; i < 2; i++) {
        REQUIRE_OK(read_table(write_table(&h200, others[i][0], others[i][1]), &out, &fits));
        CHECK(fits == 0 && out.pass_us == -1 && !out.token_us, "%s", others[i][1]);
    }
}

static const struct {
    const char *find, *replace, *words[3];
} bad_files[] = {
    {"version = 1", "version = 2", {"line 2", "expected version 1, got '2'", "ep_tune"}},
    {"NVIDIA H200", "NVIDIA A100", {"this rank's GPU, NVIDIA H200", "'NVIDIA A100'"}},
    {"= 9.0", "= 8.0", {"capability 9.0", "'8.0'"}},
    {"gpus = 4", "gpus = 0", {"gpus = 1 .. 1024", "'0'"}},
    {"gpus = 4", "gpus = 4x", {"gpus = 1 .. 1024", "'4x'"}},
    {"= nvlink", "= rope", {"none, nvlink or peer", "'rope'"}},
    {"gpus = 4\n", "", {"version, gpu, capability, gpus and links before"}},
    {"gpus = 4\n", "gpus = 4\ngpus = 4\n", {"'gpus' comes twice"}},
    {"\nend\n", NULL, {"a last line 'end'", "cut short"}},
    {"0000\n# few: block sends rows", NULL, {"a last line 'end'", "cut short"}},
    {"\nend\n", "\nend\npass_us = 1\n", {"after the line 'end'", "pass_us"}},
    {"pass_us = 2.5", "passing_us = 2.5", {"the name of a constant", "'passing_us'"}},
    {"pass_us = 2.5", "pass_us 2.5", {"NAME = VALUE", "pass_us 2.5"}},
    {"pass_us = 2.5", "pass_us =", {"pass_us: expected a number of 0 .. 1000 (us), got ''"}},
    {"pass_us = 2.5", "pass_us = 2.5us", {"pass_us: expected a number", "'2.5us'"}},
    {"pass_us = 2.5", "pass_us = -1", {"pass_us: expected a number", "'-1'"}},
    {"pass_us = 2.5", "pass_us = nan", {"pass_us: expected a number", "'nan'"}},
    {"pass_us = 2.5", "pass_us = 1e4", {"pass_us: expected a number", "'1e4'"}},
    {"pass_us = 2.5", "pass_us = 2.5\npass_us = 2.5", {"'pass_us' comes twice"}},
    {"many_spare = 2", "many_spare = 1", {"many_spare above few_spare"}},
};

SoloTest(runtime_tuning, files_that_are_refused) {
    EpTuning out, before = {.pass_us = -1};
    int fits;
    for (int i = 0; i < LENGTH(bad_files); i++) {
        const char *path = write_table(&h200, bad_files[i].find, bad_files[i].replace);
        check_note("%s becomes %s", bad_files[i].find, bad_files[i].replace);
        CHECK_REFUSED(read_table(path, &out, &fits), EP_ERR_SETTING, "LIBEP_TUNING", path,
                      bad_files[i].words[0], bad_files[i].words[1], bad_files[i].words[2]);
        CHECK(fits == -1 && memcmp(&out, &before, sizeof(out)) == 0, "outputs were written");
        unlink(path);
    }
    CHECK_REFUSED(read_table("/nowhere", &out, &fits), EP_ERR_SETTING, "/nowhere", "can be read");
    CHECK_REFUSED(read_table("/", &out, &fits), EP_ERR_SETTING, "cannot be read");
}

SoloTest(runtime_tuning, rows) {
    EpTuningKey key = h200;
    int known;
    for (key.gpus = 1; key.gpus <= 9; key.gpus++) {
        (void)ep_tuning_find(&key, &known);
        CHECK(known == (key.gpus == 2 || key.gpus == 4 || key.gpus == 8), "%d GPUs", key.gpus);
    }
    key = h200, key.capability = 80;
    CHECK(ep_tuning_find(&key, &known) == &ep_tuning_hopper && !known, "no guess");
}

#if TESTS_ON_GPU

/* As unlike the usual table as tables may be, and unlike the neighbour's. */
static void set_extremes(EpTuning *t, int rank) {
    double part = rank % 2 ? .95 : .03;
    t->copies_sent = t->factors_sent = t->sums_sent = (EpSenders){part, part};
    t->alone_sent = (EpSenders){part, part};
    t->pass_us = t->token_us = rank % 2 ? 0 : 900, t->most_claimed = rank % 2 ? 1 : 1 << 20;
    t->copies = t->factors = t->sums = rank % 2 ? (EpFineness){1, 1} : (EpFineness){4, 20};
    t->latency_dispatch_sent = t->latency_combine_sent = t->latency_few_sent = 1 - part;
    t->wanted_stages = rank % 2 ? 2 : 40;
}

/* Ranks need not agree: what they exchange does not depend on how blocks divide it. */
static void check_extremes(const EpBootstrap *bootstrap, const char *text) {
    Step step = open_step_of(bootstrap, text);
    set_extremes(&ep_cuda(step.group)->tuned.constants, step.rank);
    step_all(&step);
    step_all(&step);
    close_step(&step);
}

ThreadTest(runtime_tuning, of_each_rank, 4) {
    set_on_ranks(bootstrap, "EMULATED_SMS", "12");
    check_extremes(bootstrap,
                   "max_tokens=37 top_k=5 experts=9 hidden=200 weighted=1 mode=throughput");
    check_extremes(bootstrap,
                   "max_tokens=37 top_k=5 experts=9 hidden=200 layout=flat mode=latency");
}

/* A group's own table as a file: it names the source, and a wrong one on any rank is refused on
 * all, with the first one's words. */
ThreadTest(runtime_tuning, of_a_group, 2) {
    static char text[EP_TUNING_BYTES];
    static const char *path;
    char mine[EP_TUNING_BYTES];
    EpGroupConfig config = group_config(2);
    EpGroup *group = open_group_with(bootstrap, &config);
    CHECK_REFUSED(ep_group_tuning(group, NULL, 9), EP_ERR_NULL, "text");
    CHECK_REFUSED(ep_group_tuning(group, mine, 9), EP_ERR_BUFFER_SIZE, "at least", "got 9");
    REQUIRE_OK(ep_group_tuning(group, mine, sizeof(mine)));
    CHECK(!strstr(group_info(group).tuning, "the file"), "%s", group_info(group).tuning);
    ep_group_destroy(group);
    if (bootstrap->rank == 0) {
        path = temporary_file(), strcpy(text, mine);
        FILE *file = fopen(path, "w");
        fputs(text, file), fclose(file);
    }
    set_on_ranks(bootstrap, "LIBEP_TUNING", path);
    group = open_group_with(bootstrap, &config);
    REQUIRE_OK(ep_group_tuning(group, mine, sizeof(mine)));
    CHECK(strcmp(mine, text) == 0 && strstr(group_info(group).tuning, path), "%s",
          group_info(group).tuning);
    ep_group_destroy(group);
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    if (bootstrap->rank == 0) CHECK(truncate(path, 300) == 0, "truncate");
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_SETTING, "LIBEP_TUNING", "cut short");
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    if (bootstrap->rank == 0) unlink(path);
    set_on_ranks(bootstrap, "LIBEP_TUNING", "/nowhere");
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_SETTING, "/nowhere", "can be read");
}

/* A table that is a guess is said once, at info. */
ThreadTest(runtime_tuning, guess, 2) {
    static const char *path;
    EpGroupConfig config = group_config(2);
    if (bootstrap->rank == 0) path = temporary_file();
    set_on_ranks(bootstrap, "LIBEP_LOG", "info");
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", path);
    int guesses = 0;
    for (int i = 0; i < 2; i++) {
        EpGroup *group = open_group_with(bootstrap, &config);
        guesses = strstr(group_info(group).tuning, "a guess for capability") != NULL;
        ep_group_destroy(group);
    }
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    int lines = count_lines(path, "is a guess for capability");
    CHECK(lines <= guesses, "said %d times", lines);
#ifdef TESTS_EMULATED
    CHECK(guesses, "emulated GPUs are known");
#endif
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    if (bootstrap->rank == 0) unlink(path);
}

#endif
#endif
