/* SPDX-License-Identifier: Apache-2.0 */
/* Settings: read from the environment, listed in full, and validated. */
#include "tests/cases/run.h"

/* The results of a visit for one setting. */
typedef struct Seen {
    const char *name;
    int times, total;
    char value[64], standard[64];
} Seen;

static void visit(const EpSetting *setting, void *context) {
    Seen *seen = context;
    seen->total++;
    CHECK(setting->struct_size == sizeof(*setting), "%zu", setting->struct_size);
    CHECK(strncmp(setting->name, "LIBEP_", 6) == 0, "%s", setting->name);
    CHECK(setting->type[0] && setting->doc[0], "%s has no type or no words", setting->name);
    if (strcmp(setting->name, seen->name) != 0) return;
    seen->times++;
    snprintf(seen->value, sizeof(seen->value), "%s", setting->value);
    snprintf(seen->standard, sizeof(seen->standard), "%s", setting->default_value);
}

SoloTest(runtime_settings, listed_with_their_defaults) {
    Seen seen = {.name = "LIBEP_TIMEOUT"};
    unsetenv("LIBEP_TIMEOUT");
    CHECK_OK(ep_settings(visit, &seen));
    CHECK(seen.times == 1, "LIBEP_TIMEOUT came %d times of %d", seen.times, seen.total);
    CHECK(strcmp(seen.standard, "100") == 0, "%s", seen.standard);
    CHECK(strcmp(seen.value, "100") == 0, "%s", seen.value);
}

SoloTest(runtime_settings, value_in_force) {
    Seen seen = {.name = "LIBEP_TIMEOUT"};
    setenv("LIBEP_TIMEOUT", "2.5", 1);
    CHECK_OK(ep_settings(visit, &seen));
    CHECK(strcmp(seen.value, "2.5") == 0, "%s", seen.value);
    CHECK(strcmp(seen.standard, "100") == 0, "%s", seen.standard);
}

SoloTest(runtime_settings, unknown_name) {
    Seen seen = {.name = "LIBEP_TIMEOUT"};
    setenv("LIBEP_TIMEOUTS", "3", 1);
    CHECK_REFUSED(ep_settings(visit, &seen), EP_ERR_SETTING, "LIBEP_TIMEOUTS");
    CHECK(seen.times == 1, "the visit did not take place");
    CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, "LIBEP_TIMEOUTS");
    unsetenv("LIBEP_TIMEOUTS");
    CHECK_OK(ep_settings(NULL, NULL));
}

/* Names that only look similar belong to other programs. */
SoloTest(runtime_settings, names_of_others) {
    setenv("EPOCHS", "3", 1);
    setenv("MY_EP_TIMEOUT", "x", 1);
    setenv("ep_timeout", "x", 1);
    CHECK_OK(ep_settings(NULL, NULL));
}

typedef struct Malformed {
    const char *name, *value;
} Malformed;

static const Malformed malformed[] = {
    {"LIBEP_TIMEOUT", "abc"},
    {"LIBEP_TIMEOUT", "-1"},
    {"LIBEP_TIMEOUT", "0"},
    {"LIBEP_TIMEOUT", "3s"},
    {"LIBEP_TIMEOUT", "inf"},
    {"LIBEP_TIMEOUT", "nan"},
    {"LIBEP_TIMEOUT", ""},
    {"LIBEP_STAGE_BYTES", "-5"},
    {"LIBEP_STAGE_BYTES", "12Q"},
    {"LIBEP_WEIGHT_SMS", "some"},
    {"LIBEP_SHARED_BYTES", "99KB"},
    {"LIBEP_STAGE_BYTES", "4KB"},
    {"LIBEP_STAGE_BYTES", "lots"},
    {"LIBEP_STAGE_BYTES", "99999999999999G"},
    {"LIBEP_BACKEND", "gpu"},
    {"LIBEP_BACKEND", "HOST"},
    {"LIBEP_BACKEND", "hos"},
    {"LIBEP_LOG", "loud"},
    {"LIBEP_BIND", "cpu"},
    {"LIBEP_BIND", "GPU"},
    {"LIBEP_CHECK", "1"},
    {"LIBEP_CHECK", "everything"},
    {"LIBEP_PEERS", "some"},
    {"LIBEP_TOPOLOGY", "x"},
    {"LIBEP_TOPOLOGY", "-2"},
    {"LIBEP_TOPOLOGY", "0"},
    {"LIBEP_TOPOLOGY", "1025"},
    {"LIBEP_TOPOLOGY", "0,"},
    {"LIBEP_TOPOLOGY", ",0"},
    {"LIBEP_TOPOLOGY", "0,,1"},
    {"LIBEP_TOPOLOGY", "0,-1"},
    {"LIBEP_TOPOLOGY", "0,1;0"},
    {"LIBEP_TOPOLOGY", "0,99999999999999999999"},
    {"LIBEP_TOPOLOGY", "0,1,0/gibberish"},
    {"LIBEP_TOPOLOGY", "2/gibberish"},
    {"LIBEP_TOPOLOGY", "2/numa:999999 pu:9999"},
    {"LIBEP_TOPOLOGY", "2/numa:2(memory=1GB) l2cache:1024 core:1024 pu:1"},
    {"LIBEP_TOPOLOGY", "2/1024 1025"},
    {"LIBEP_TOPOLOGY", "2/pu:0xffffffff"},
    {"LIBEP_TOPOLOGY", "2/pu:-1"},
    {"LIBEP_TOPOLOGY", "2/pu:99999999999999999999999"},
};

/* An error names the values that the setting accepts. */
SoloTest(runtime_settings, sentences_of_counts_and_sizes) {
    setenv("LIBEP_NUM_SMS", "many", 1);
    CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, "LIBEP_NUM_SMS", "or auto");
    unsetenv("LIBEP_NUM_SMS");
    setenv("LIBEP_STAGE_BYTES", "many", 1);
    CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, "LIBEP_STAGE_BYTES", "512K");
    unsetenv("LIBEP_STAGE_BYTES");
}

/* hwloc is not asked about a machine that is too large: it would take minutes. */
SoloTest(runtime_settings, machines_that_are_too_large) {
    setenv("LIBEP_TOPOLOGY", "2/numa:999999 pu:9999", 1);
    CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, "LIBEP_TOPOLOGY",
                  "at most 4096 processing units", "2/numa:999999 pu:9999");
    static const char *const valid[] = {"2/numa:2 core:4 pu:1", "2/numa:64 pu:64",
                                        "2/[numa(memory=1GB)] group2:2 l3:2(size=1MB) pu:4",
                                        "2/2 4 0x10"};
    for (size_t i = 0; i < sizeof(valid) / sizeof(valid[0]); i++) {
        setenv("LIBEP_TOPOLOGY", valid[i], 1);
        check_note("%s", valid[i]);
        CHECK_OK(ep_settings(NULL, NULL));
    }
    unsetenv("LIBEP_TOPOLOGY");
}

/* A list has the nodes of as many ranks as the largest group; a machine may follow it. */
SoloTest(runtime_settings, lists_of_nodes) {
    char list[8192];
    size_t length = 0;
    for (int r = 0; r < EP_MAX_RANKS; r++)
        length += (size_t)snprintf(list + length, 16, "%s%d", r ? "," : "", EP_MAX_RANKS - r);
    strcpy(list + length, "/numa:2 core:4 pu:1");
    setenv("LIBEP_TOPOLOGY", list, 1);
    CHECK_OK(ep_settings(NULL, NULL));
    memset(list + length + strlen("/numa:2"), ' ', 256);
    strcpy(list + length + 260, "pu:1");
    setenv("LIBEP_TOPOLOGY", list, 1);
    CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, "LIBEP_TOPOLOGY", "255 characters");
    strcpy(list + length, ",1");
    setenv("LIBEP_TOPOLOGY", list, 1);
    CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, "LIBEP_TOPOLOGY", "each rank's node");
    setenv("LIBEP_TOPOLOGY", "0,x", 1);
    CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, "LIBEP_TOPOLOGY", "each rank's node",
                  "0,1,0,1", "'0,x'");
    unsetenv("LIBEP_TOPOLOGY");
}

SoloTest(runtime_settings, malformed_values_refuse_the_group) {
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    Case c = case_complete((Case){.ranks = 1});
    EpGroupConfig config = case_group_config(&c);
    for (size_t i = 0; i < sizeof(malformed) / sizeof(malformed[0]); i++) {
        /* The error quotes the description of a machine alone. */
        const char *machine = strchr(malformed[i].value, '/');
        const char *said = machine ? machine + 1 : malformed[i].value;
        EpGroup *group = NULL;
        check_note("%s=%s", malformed[i].name, malformed[i].value);
        setenv(malformed[i].name, malformed[i].value, 1);
        CHECK_REFUSED(ep_group_create(&bootstrap, &config, &group), EP_ERR_SETTING,
                      malformed[i].name, said);
        CHECK(group == NULL, "a group was made");
        CHECK_REFUSED(ep_settings(NULL, NULL), EP_ERR_SETTING, malformed[i].name, said);
        unsetenv(malformed[i].name);
    }
    EpGroup *group = open_group(&bootstrap, &c);
    ep_group_destroy(group);
    ep_bootstrap_destroy(&bootstrap);
}

/* Run `body` with stderr redirected to a file, and return its output in `text`. */
static void capture(void (*body)(void), char *text, size_t size) {
    FILE *file = tmpfile();
    int before = dup(STDERR_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    body();
    dup2(before, STDERR_FILENO);
    close(before);
    rewind(file);
    text[fread(text, 1, size - 1, file)] = 0;
    fclose(file);
}

static void make_a_group(void) {
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    run_case(&bootstrap, &(Case){.ranks = 1, .weighted = 1});
    ep_bootstrap_destroy(&bootstrap);
}

SoloTest(runtime_settings, unknown_name_is_a_warning_of_the_group) {
    static char text[65536];
    setenv("LIBEP_STAGEBYTES", "4096", 1);
    capture(make_a_group, text, sizeof(text));
    CHECK(strstr(text, "LIBEP_STAGEBYTES"), "no warning: '%s'", text);
}

SoloTest(runtime_settings, silent_on_success) {
    static char text[65536];
    capture(make_a_group, text, sizeof(text));
    CHECK(text[0] == 0, "'%s'", text);
}

SoloTest(runtime_settings, log_into_a_file) {
    static char text[65536], errors[65536];
    const char *path = temporary_file();
    setenv("LIBEP_LOG", "trace", 1);
    setenv("LIBEP_LOG_FILE", path, 1);
    capture(make_a_group, errors, sizeof(errors));
    read_file(path, text, sizeof(text));
    unlink(path);
    CHECK(text[0] != 0, "the log is empty");
    CHECK(errors[0] == 0, "stderr has: '%s'", errors);
}
