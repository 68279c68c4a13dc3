"""What the gateway survives, row by row, and the tests that show it: `make faults` runs them all."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """What happens, what the gateway makes of it, and the tests that show it, by their files below tests/."""

    fault: str
    outcome: str
    tests: dict[str, list[str]]

    @property
    def node_ids(self) -> list[str]:
        return [
            f"tests/{file}.py::test_{name}" for file, names in self.tests.items() for name in names
        ]


TRITON = (
    Row(
        "the only Triton is killed under load",
        "502 or 503 for what was under way, then 503 with `Retry-After` within 10 ms; `/readyz` "
        "503, `/livez` 200; served again within 2 s of its return",
        {
            "faults/test_triton_faults": [
                "killing_the_only_triton_under_load_gives_503_until_it_is_back"
            ],
            "system/test_fleet_failures": [
                "without_its_only_triton_it_refuses_and_serves_again_when_that_is_back"
            ],
            "system/test_up": ["a_killed_triton_is_503_at_once_and_then_started_again"],
        },
    ),
    Row(
        "one of three Tritons is killed under load",
        "only what it was working on fails; its models come back with it",
        {
            "system/test_fleet_failures": [
                "one_of_three_killed_costs_only_the_requests_that_it_had_and_comes_back"
            ]
        },
    ),
    Row(
        "a Triton accepts requests and never answers",
        "504 at the deadline for those it had, then it is left alone; the others do not notice",
        {
            "system/test_fleet_failures": ["one_of_three_that_never_answers_is_left_alone"],
            "faults/test_upstream": [
                "a_replica_that_accepts_and_never_answers_costs_its_requests_their_deadline"
            ],
            "integration/test_fleet_simulation": [
                "a_replica_that_accepts_and_never_answers_is_left_alone"
            ],
        },
    ),
    Row(
        "a Triton cannot be connected to: refused, swallowed, reset",
        "another one answers, at most 0.5 s later",
        {
            "faults/test_upstream": [
                "a_replica_that_cannot_be_reached_costs_the_connect_timeout_and_then_nothing"
            ],
            "integration/test_fleet_simulation": [
                "a_refused_connection_is_not_the_callers_business",
                "a_black_hole_costs_a_few_callers_half_a_second_and_then_nobody_anything",
            ],
        },
    ),
    Row(
        "a Triton becomes 500 ms slower than the others",
        "it gets at most a quarter of its share",
        {
            "faults/test_upstream": ["a_replica_that_is_500_ms_slower_gets_a_quarter_of_its_share"],
            "integration/test_fleet_simulation": [
                "a_slow_replica_gets_little_and_costs_the_callers_little"
            ],
        },
    ),
    Row(
        "an answer is garbage, cut short, of a wrong length, or followed by another",
        "502, or an answer that is visibly cut where it had begun; its connection is not used "
        "again, and nobody gets another's answer",
        {
            "faults/test_upstream": [
                "a_spoilt_answer_is_502_or_cut_and_its_connection_is_not_used_again",
                "every_answer_goes_to_its_own_request",
            ],
            "unit/test_http": [
                "ten_thousand_requests_are_answered_with_their_own_answers_or_fail_cleanly"
            ],
        },
    ),
    Row(
        "an answer comes byte by byte",
        "it is passed on byte for byte",
        {
            "faults/test_upstream": ["an_answer_in_pieces_is_right_byte_for_byte"],
            "unit/test_http": ["an_answer_is_read_the_same_wherever_it_is_cut"],
        },
    ),
    Row(
        "Triton closes an idle connection as it is used again",
        "200 or 502; nothing runs twice",
        {
            "faults/test_upstream": ["a_connection_that_closes_as_it_is_reused_runs_nothing_twice"],
            "unit/test_http": [
                "a_connection_that_closes_as_it_is_reused_runs_its_request_at_most_once"
            ],
        },
    ),
    Row(
        "a model's queue in Triton is full",
        "429 with `Retry-After`; other models are served as before",
        {
            "faults/test_triton_faults": [
                "a_full_queue_of_a_model_is_429_and_other_models_are_served"
            ]
        },
    ),
    Row(
        "a model is unloaded behind the gateway's back",
        "503 within 1 s, or another Triton that has it; other models are served",
        {
            "faults/test_triton_faults": [
                "a_model_unloaded_behind_the_gateways_back_is_503_and_others_are_served"
            ],
            "system/test_fleet_models": ["a_model_unloaded_behind_our_back_costs_no_request"],
            "integration/test_demo": ["an_unloaded_model_is_not_unknown"],
        },
    ),
    Row(
        "a model takes long to load",
        "other models are served at their usual pace",
        {"system/test_fleet_models": ["a_slow_load_disturbs_no_other_model"]},
    ),
    Row(
        "a load fails: a bad config, no version, an exception at the start",
        "422 with Triton's reason, without its paths; the version that served goes on",
        {
            "faults/test_triton_faults": [
                "a_load_that_fails_is_422_without_secrets_and_the_version_that_served_goes_on"
            ],
            "system/test_fleet_failures": [
                "a_load_that_fails_everywhere_says_why_and_the_older_version_keeps_serving"
            ],
        },
    ),
    Row(
        "fifty loads and unloads of one model at once",
        "one after the other; the last one counts",
        {
            "system/test_fleet_models": ["fifty_calls_for_one_model_end_as_the_last_of_them_says"],
            "integration/test_fleet_simulation": [
                "many_loads_and_unloads_of_a_model_follow_one_another"
            ],
        },
    ),
    Row(
        "a load reaches two of three Tritons",
        "502 that says where; asked only there; made up for within 15 s",
        {
            "system/test_fleet_models": [
                "a_load_that_fails_on_one_replica_is_reported_routed_around_and_made_good"
            ],
            "integration/test_fleet_simulation": [
                "a_load_that_one_of_three_cannot_take_is_told_of_and_made_up_for"
            ],
        },
    ),
    Row(
        "a model is replaced by one of another shape",
        "its new shape holds at once, or from the first answer that contradicts; nothing is "
        "reshaped",
        {"integration/test_models": ["a_model_replaced_by_one_of_another_shape_is_seen"]},
    ),
    Row(
        "a Triton's metrics page hangs or is garbage",
        "the page is whole within 2 s without its samples, and says that it is down",
        {
            "integration/test_metrics_page": [
                "a_replica_that_is_dead_hangs_or_talks_nonsense_costs_only_its_own_samples"
            ]
        },
    ),
    Row(
        "an answer is well-formed HTTP, and no answer of a Triton: JSON of other types, shapes and names",
        "502; 200 where it can be read",
        {
            "faults/test_replica_answers": [
                "an_inference_that_cannot_be_read_is_502",
                "texts_in_json_are_read_as_such",
                "metadata_that_cannot_be_read_is_502",
            ]
        },
    ),
    Row(
        "an answer has no end, or is larger than may be held",
        "502 from `/v1`, and no more than `GATEWAY_MAX_ANSWER_BYTES` in memory; `/v2` passes it on as "
        "it comes",
        {
            "faults/test_replica_answers": ["an_answer_without_an_end_is_502_and_not_kept"],
            "faults/test_shield": [
                "an_answer_that_is_too_large_to_hold_is_502_and_costs_nobody_else"
            ],
            "unit/test_sse": ["an_error_that_does_not_end_is_cut"],
        },
    ),
    Row(
        "DNS has new addresses, none, or an error",
        "new ones are used at the next look; else the last good ones stay",
        {
            "integration/test_fleet_simulation": [
                "a_name_that_cannot_be_looked_up_keeps_what_it_stood_for",
                "a_name_that_stands_for_nothing_at_the_start_is_looked_up_again",
                "an_address_that_is_gone_gets_nothing_more",
                "a_new_replica_gets_its_models_with_nobody_doing_anything",
            ]
        },
    ),
)

OURSELVES = (
    Row(
        "SIGTERM under load, restarts one after the other",
        "`/readyz` 503 first, then what is under way ends; no request fails",
        {
            "system/test_shutdown": [
                "it_says_that_it_is_not_ready_finishes_what_it_has_and_ends_with_0"
            ],
            "faults/test_load": [
                "no_request_is_lost_while_two_gateways_are_restarted_again_and_again"
            ],
        },
    ),
    Row(
        "a worker process is killed",
        "the others serve, it is replaced, and what it was doing is not counted any more",
        {
            "system/test_workers": ["a_killed_worker_is_replaced_while_the_other_serves"],
            "faults/test_gateway_faults": [
                "what_a_killed_worker_was_doing_is_not_counted_for_ever"
            ],
        },
    ),
    Row(
        "32 images of 25 megapixels at once",
        "all are answered; 99 of 100 `/livez` within 100 ms, and no more than 100 megapixels in "
        "memory",
        {
            "faults/test_gateway_faults": [
                "thirty_two_images_of_25_megapixels_do_not_hold_up_the_loop"
            ],
            "integration/test_images": ["large_images_do_not_hold_up_others"],
        },
    ),
    Row(
        "no file descriptors are left",
        "connections are shed without spinning, and taken again afterwards",
        {"integration/test_serve_process": ["it_sheds_and_recovers_when_there_are_no_descriptors"]},
    ),
    Row(
        "the state file is damaged, cannot be written, or its disk is full",
        "a sentence at the start; later the change is 503, and nothing that was kept is lost",
        {
            "faults/test_gateway_faults": [
                "a_state_that_cannot_be_read_ends_the_start_with_a_sentence",
                "a_state_that_cannot_be_written_refuses_changes_and_nothing_else",
            ],
            "unit/test_state": [
                "a_damaged_file_is_told_and_left_alone",
                "a_file_that_is_damaged_later_is_not_written_over",
            ],
            "integration/test_state_processes": [
                "a_disk_that_is_full_loses_nothing_that_was_kept",
                "a_process_killed_while_it_writes_leaves_a_whole_file",
            ],
        },
    ),
    Row(
        "Redis goes away and comes back",
        "serving goes on as last known; changes are 503 meanwhile",
        {
            "system/test_fleet_state": ["two_gateways_share_their_wishes_in_redis"],
            "integration/test_state_redis": [
                "redis_may_be_away_at_the_start_and_later",
                "a_redis_that_hangs_is_not_waited_for",
            ],
            "integration/test_rates": [
                "two_gateways_with_one_redis_count_together_and_alone_while_it_is_away"
            ],
        },
    ),
    Row(
        "a gateway, Redis or a Triton is killed or paused while models are loaded and unloaded",
        "within 15 s every Triton serves what was asked for last, every gateway says so, and nothing "
        "changes back and forth; the other models are served",
        {
            "system/test_fleet_random": [
                "a_fleet_of_two_gateways_comes_to_rest_whatever_happens",
                "a_fleet_of_two_gateways_comes_to_rest_two_hundred_times",
            ]
        },
    ),
    Row(
        "a gateway ends in the midst of a load, or a Triton misses one",
        "the gateway that leads finishes it, also after a restart; an older version that is ready there "
        "does not count",
        {
            "integration/test_fleet_simulation": [
                "a_load_that_a_replica_missed_is_made_good",
                "a_load_that_a_gateway_did_not_finish_is_finished_by_the_next",
                "gateways_that_load_at_once_come_to_rest",
            ]
        },
    ),
    Row(
        "a misspelt or slow model is added to the models file",
        "every gateway stays ready, and says that it is pending",
        {
            "integration/test_fleet_simulation": [
                "what_is_declared_while_the_gateway_runs_counts_once_it_was_ready"
            ]
        },
    ),
    Row(
        "the clock is set back or forward by an hour, here or in Redis",
        "no key is locked out, and each has its requests per second as before",
        {
            "unit/test_rate_clock": ["the_time_of_day_may_be_set_and_locks_nobody_out"],
            "integration/test_rate_clock": [
                "a_clock_that_is_set_back_in_redis_locks_no_key_out",
                "the_gateways_own_clock_plays_no_part",
            ],
        },
    ),
    Row(
        "standard error is a pipe that nobody reads",
        "requests are served as before; lines are dropped, counted, and said to be missing; the end "
        "comes in time",
        {
            "integration/test_log_queue": [
                "every_request_is_answered_and_what_is_missing_of_the_log_is_said",
                "it_ends_in_time_though_nobody_reads",
                "the_workers_of_a_full_pipe_serve_and_end",
            ],
            "system/test_full_pipe": ["triton_serves_on_and_everything_ends"],
        },
    ),
    Row(
        "a disk hangs, or a thread or the event loop, when the gateway is to end",
        "it ends when `GATEWAY_DRAIN_S` and `GATEWAY_SHUTDOWN_S` are over, 5 s later at the latest, and "
        "says so",
        {
            "system/test_shutdown_deadline": [
                "a_disk_that_hangs_is_left_behind",
                "so_do_workers",
                "a_loop_that_hangs_ends_with_the_time_for_shutting_down",
            ]
        },
    ),
    Row(
        "two and ten times as many requests as can be served",
        "at least 90 and 80 % of what can be served is; the others are refused within "
        "milliseconds; as before 5 s later",
        {"faults/test_load": ["more_than_its_capacity_costs_it_none_of_it"]},
    ),
    Row(
        "5,000 idle connections",
        "at most 100 MiB, and nobody else notices",
        {
            "faults/test_load": [
                "five_thousand_idle_connections_cost_little_and_nobody_else_anything"
            ]
        },
    ),
    Row(
        "requests of all kinds for a long time",
        "less than 1 MiB more per 10,000; as many descriptors and threads as before",
        {"faults/test_load": ["ten_thousand_requests_of_all_kinds_leave_nothing_behind"]},
    ),
    Row(
        "a client leaves",
        "its place is free within 200 ms, and its request to Triton is closed",
        {
            "faults/test_gateway_faults": [
                "a_client_that_leaves_frees_its_place",
                "a_client_that_is_still_sending_holds_no_place",
            ],
            "integration/test_v2": [
                "a_client_may_leave",
                "who_leaves_a_stream_closes_its_request_to_triton",
            ],
            "integration/test_streams": ["who_leaves_cancels_the_inference"],
        },
    ),
    Row(
        "a client does not read its answer",
        "it is cut off after 30 s; memory stays bounded",
        {
            "unit/test_deadlines": [
                "a_client_that_never_reads_is_cut_off",
                "the_system_keeps_little_of_what_a_client_does_not_read",
                "a_client_that_never_reads_its_last_answer_is_cut_off",
            ],
            "integration/test_v2": ["tensors_of_16_mib_flow_through_several_at_once"],
        },
    ),
)

BAD_INPUT = (
    Row(
        "bodies over the limit, with a length or in chunks",
        "413, before the body is read or at the limit",
        {
            "integration/test_infer": [
                "a_body_over_the_limit_is_413_before_it_is_read",
                "a_chunked_body_over_the_limit_is_413_at_the_limit",
            ],
            "integration/test_v2": [
                "a_body_over_the_limit_is_413_whether_its_length_is_told_or_not"
            ],
        },
    ),
    Row(
        "lengths that are none, several, or beside chunks; no Host, two",
        "400, and the connection is closed",
        {
            "unit/test_hardening": ["what_could_be_read_in_two_ways_is_refused"],
            "unit/test_protocol": ["garbage_is_refused_and_not_listened_to_again"],
        },
    ),
    Row(
        "headers of 1 MB, 5,000 fields, a URL of 60 KB",
        "431 or 414 while they come, without filling memory",
        {
            "unit/test_hardening": [
                "what_is_too_large_is_refused_while_it_comes",
                "what_is_too_large_is_refused_in_small_pieces",
                "a_header_without_an_end_fills_no_memory",
            ]
        },
    ),
    Row(
        "JSON with NaN, 1e999, half a surrogate, bad UTF-8, a depth of 100,000, an integer of "
        "5,000 digits",
        "400; never 500",
        {
            "integration/test_infer": [
                "json_that_is_none_is_400",
                "an_integer_of_5000_digits_does_no_harm",
            ]
        },
    ),
    Row(
        "forms cut short or of 2,000 fields, a file called ../../etc/passwd",
        "400 or 413; a file name is only a name",
        {
            "integration/test_infer": ["a_form_that_is_none", "a_file_name_is_only_a_name"],
            "integration/test_demo": ["a_large_form_leaves_no_file"],
        },
    ),
    Row(
        "images that are none, cut, of another format, or claim 13,000 × 13,000 pixels",
        "422, or 413 before a pixel is decoded",
        {
            "integration/test_images": ["an_image_that_is_none"],
            "integration/test_demo": ["junk_instead_of_an_image_is_422_with_a_sentence"],
            "unit/test_digits": ["damaged_bytes_never_raise_anything_but_a_picture_error"],
        },
    ),
    Row(
        "CMYK, palettes with transparency, 16 bits of grey, turned by EXIF",
        "the picture that a person sees",
        {
            "integration/test_images": [
                "cmyk_grey_and_black_and_white",
                "a_palette_with_transparency",
                "sixteen_bits_are_scaled_and_not_clipped",
                "exif_orientation_is_applied",
            ]
        },
    ),
    Row(
        "NumPy files with pickles, or that claim 10 GB",
        "400, or 413 for an archive that inflates beyond the limit",
        {
            "integration/test_infer": [
                "pickles_are_not_taken",
                "a_numpy_file_that_is_none_is_400",
                "an_archive_that_inflates_beyond_the_limit_is_413",
                "an_archive_that_is_none_is_400",
            ]
        },
    ),
    Row(
        "images, NumPy files, archives and forms that contradict themselves, or say little and would "
        "cost much",
        "a 4xx with the reason, before a library reads them; metadata is not read; others are "
        "answered meanwhile",
        {
            "faults/test_hostile_files": [
                "a_hostile_file_is_refused_or_served_while_others_are_answered",
                "instances_that_are_an_inference_each_are_bounded",
            ],
            "unit/test_image_header": [
                "what_contradicts_its_format_is_a_bad_image",
                "what_has_too_much_of_something_is_too_large",
                "a_mutated_file_is_decoded_or_refused_with_a_sentence",
                "metadata_of_a_png_goes_no_further",
                "metadata_of_a_jpeg_goes_no_further",
            ],
            "unit/test_npy": [
                "a_hostile_header_is_malformed",
                "a_mutated_file_is_converted_or_refused_with_a_sentence",
            ],
            "unit/test_npz": [
                "what_contradicts_itself_is_malformed",
                "one_budget_bounds_what_all_of_it_inflates_to",
                "a_mutated_archive_is_read_or_refused_with_a_sentence",
            ],
            "unit/test_multipart": [
                "a_part_that_is_none_is_refused",
                "a_header_is_refused_while_it_comes",
            ],
            "unit/test_bounds": ["many_tiny_images_are_refused_before_they_are_decoded"],
        },
    ),
    Row(
        "headers, texts, values and files that a parser could look at again and again",
        "the cost is in proportion to the length, whatever they hold",
        {"unit/test_linear_cost": ["the_cost_is_linear"]},
    ),
    Row(
        "texts that are empty, of 1 MB, with NUL, combining marks, emoji",
        "they arrive as they are",
        {"integration/test_infer": ["texts_pass_as_utf8", "bytes_pass_as_they_are"]},
    ),
    Row(
        "tensors with missing, unknown or doubled inputs, ragged, of a wrong type, count, range "
        "or batch",
        "422 with the input's name, what it takes and what came; never changed silently",
        {
            "integration/test_infer": [
                "a_value_that_does_not_fit_is_named",
                "an_array_that_would_be_changed_is_refused",
                "names_that_do_not_fit_are_answered_with_those_that_do",
                "an_empty_batch_does_not_fit",
            ],
            "faults/test_bad_input": [
                "tensors_that_cannot_be_are_the_clients_mistake_on_the_way_through"
            ],
            "integration/test_shapes": ["triton_never_sees_it"],
        },
    ),
    Row(
        "names with ../, %00, CR and LF, of 300 characters; versions that are none",
        "404, and Triton is not asked for anything else",
        {
            "integration/test_infer": ["a_name_that_is_none_is_404"],
            "integration/test_demo": ["an_unknown_version_is_404"],
            "integration/test_v2": ["what_triton_does_not_have_is_refused_in_our_words"],
        },
    ),
    Row(
        "deadlines of 0, −1, `abc`, 1e9 s",
        "400; one that is too long is shortened",
        {
            "integration/test_infer": [
                "a_deadline_that_cannot_be_is_400",
                "a_deadline_that_is_too_long_is_clamped",
            ]
        },
    ),
    Row(
        "an `Accept` that nothing satisfies",
        "406",
        {"integration/test_infer": ["an_accept_that_nothing_satisfies_is_406"]},
    ),
    Row(
        "gzip that is none, or 10 MB of it that inflate to 10 GB",
        "400; 413 at the limit, and no more than that in memory",
        {
            "integration/test_infer": ["a_compressed_body_that_is_none_is_400_and_a_bomb_413"],
            "faults/test_bad_input": ["ten_gigabytes_in_ten_megabytes_are_413_and_never_in_memory"],
        },
    ),
)

ATTACKS = (
    Row(
        "slow headers, slow bodies, slow readers, 1,000 silent connections",
        "closed at their deadlines; others are served meanwhile",
        {
            "faults/test_slow_clients": [
                "a_thousand_slow_clients_are_gone_at_their_deadline_and_others_are_served"
            ],
            "unit/test_hardening": [
                "a_thousand_silent_connections_are_closed_and_others_served_meanwhile",
            ],
            "unit/test_deadlines": [
                "a_header_that_comes_byte_by_byte_is_given_up",
                "a_body_that_comes_too_slowly_is_given_up",
            ],
        },
    ),
    Row(
        "requests smuggled through nginx, in upgrades, in trailers",
        "nginx and the gateway count the same requests",
        {
            "integration/test_nginx": ["nginx_and_the_server_count_the_same_requests"],
            "unit/test_hardening": ["nothing_follows_a_refusal_whatever_the_application_does"],
            "integration/test_infer": [
                "an_upgrade_is_refused_before_its_body_is_taken_for_a_request",
                "trailers_do_not_become_headers",
            ],
        },
    ),
    Row(
        "65,537 chunks of six bytes, JSON with 100,000 keys",
        "little work, and little in the answer",
        {
            "faults/test_bad_input": [
                "65_537_chunks_of_six_bytes_are_a_body",
                "json_with_100_000_keys_costs_little",
            ]
        },
    ),
    Row(
        "what ends a Triton, or keeps it busy for minutes: a form's type, lengths and weights in headers, "
        "small chunks, compressed bodies that it refuses, keys",
        "400, or taken out on the way; Triton goes on, and what is like it passes",
        {
            "faults/test_shield": [
                "a_forms_type_is_never_sent_on",
                "any_other_type_is",
                "an_inference_of_megabytes_by_curls_default_works",
                "a_length_of_the_json_that_is_none_reaches_nobody",
                "one_that_is_more_than_the_body_has_reaches_nobody",
                "what_is_screened_is_what_triton_reads",
                "more_keys_than_triton_reads_in_a_moment_reach_nobody",
                "the_keys_that_pass_cost_triton_little",
                "a_parameter_of_v1_has_no_longer_name",
                "small_pieces_reach_triton_as_large_ones",
                "a_piece_is_not_kept_back_once_the_body_is_whole",
                "triton_gets_a_compressed_body_inflated",
                "an_encoding_that_triton_does_not_have_is_415",
                "a_refused_compressed_body_leaves_no_memory_behind",
                "accept_encoding_has_no_weight_that_is_no_number",
                "a_header_does_not_become_a_parameter_of_tritons_own",
            ]
        },
    ),
    Row(
        "250 KiB made to be costly to look through",
        "milliseconds; the cost is linear in the bytes, whatever they are",
        {
            "faults/test_shield": ["a_hostile_body_costs_the_gateway_milliseconds"],
            "unit/test_json_screening": [
                "the_cost_is_linear_whatever_the_bytes",
                "the_verdict_is_that_of_a_plain_reading_wherever_it_is_cut",
            ],
            "unit/test_linear_cost_protocol": ["the_cost_grows_as_the_bytes_do"],
        },
    ),
    Row(
        "names and versions that another server would decode into another path",
        "404, and Triton is not asked",
        {
            "faults/test_shield": [
                "what_is_no_version_reaches_nobody",
                "what_is_no_name_of_a_model_reaches_nobody",
                "a_version_is_the_same_however_many_zeros_it_has",
            ]
        },
    ),
    Row(
        "a model or a replica answers pages, cookies, redirections",
        "they run no script, and change nothing in a browser",
        {
            "faults/test_shield": [
                "an_answer_changes_nothing_in_a_browser",
                "a_page_that_a_model_answers_runs_no_script_here",
            ]
        },
    ),
    Row(
        "any bytes at all",
        "an answer that is whole, or a refusal; no hanging",
        {"unit/test_hardening": ["no_bytes_make_it_hang_or_fail_or_tear_an_answer"]},
    ),
    Row(
        "more connections than are taken, from one client or many",
        "503 at once; health can still be asked",
        {
            "unit/test_hardening": [
                "one_connection_too_many_is_refused_and_health_can_still_be_asked",
                "far_too_many_connections_are_refused_at_once",
            ]
        },
    ),
    Row(
        "a load that brings code, without the right to",
        "403; it never reaches Triton",
        {
            "integration/test_auth": [
                "without_the_setting_nobody_brings_code",
                "who_does_not_see_all_models_brings_no_code",
                "what_is_no_file_of_the_model_is_not_brought",
            ],
            "integration/test_demo": ["two_equal_keys_do_not_get_code_past_the_guard"],
        },
    ),
    Row(
        "a proxy on the gateway's machine passes on administration, saying who asks or not",
        "403; so it is for another user of the machine",
        {
            "integration/test_local_admin": [
                "what_a_proxy_passes_on_is_nobodys_here",
                "a_plain_proxy_pass_opens_inference_and_not_administration",
                "a_proxy_of_another_user_administers_nothing_whatever_it_says",
                "another_user_of_the_machine_administers_nothing",
                "a_page_of_another_origin_and_another_name_are_not_here",
            ]
        },
    ),
    Row(
        "a web page has its name stand for 127.0.0.1 (DNS rebinding)",
        "403 for all that it asks of a gateway on loopback without keys",
        {
            "integration/test_local_admin": [
                "a_name_that_was_made_to_stand_for_this_machine_reads_and_infers_nothing",
                "every_worker_process_refuses_another_name",
            ]
        },
    ),
    Row(
        "somebody writes code into the state, in its file or in Redis",
        "ignored, with a warning that names the model, unless uploading is allowed",
        {
            "integration/test_desired_state": [
                "code_in_the_state_is_not_run_and_the_model_is_named"
            ],
            "unit/test_desired_state_check": [
                "code_is_ignored_by_name_unless_uploading_is_allowed"
            ],
        },
    ),
    Row(
        "a web page asks the embedded Triton itself to load code",
        "403; only the gateway has the secret that each start makes",
        {
            "system/test_embedded_secret": [
                "a_page_or_another_user_manages_nothing_and_the_gateway_does",
                "grpc_is_closed_as_well",
                "a_triton_that_is_started_again_is_restricted_again",
            ]
        },
    ),
    Row(
        "no key, another role's, one cut by a character, one that is revoked in use",
        "401 or 403; a revoked one from the next look at the file",
        {
            "integration/test_auth": [
                "each_role_may_do_what_it_is_for",
                "what_is_no_key_of_anybodys_is_401",
                "a_key_is_revoked_while_it_is_in_use_and_a_broken_file_changes_nothing",
                "without_keys_administration_is_for_who_is_here_and_speaks_for_nobody_else",
            ]
        },
    ),
    Row(
        "a model outside the key's patterns, however it is spelled",
        "404, as if there were none",
        {
            "integration/test_auth": [
                "a_model_that_the_key_does_not_see_is_as_unknown_as_one_that_is_not",
                "odd_names_are_no_way_around_the_patterns",
            ]
        },
    ),
    Row(
        "shared memory of the machine, however it is spelled",
        "403, or the answer of a Triton that has none registered; it never reaches Triton",
        {"integration/test_v2": ["shared_memory_never_reaches_triton_however_it_is_spelled"]},
    ),
    Row(
        "`X-Forwarded-For` against the rate limits",
        "it changes nothing",
        {"integration/test_rates": ["whom_a_proxy_says_it_asks_for_changes_nothing"]},
    ),
    Row(
        "CR, LF and escape sequences in paths, names and request ids",
        "one line in the log, escaped",
        {"integration/test_observability": ["nothing_that_a_client_writes_ends_a_line"]},
    ),
    Row(
        "a model, a Triton or a gateway whose words speak to the terminal",
        "escaped in all that `up`, the log and the command line print",
        {
            "system/test_terminal_escapes": [
                "what_models_and_triton_say_is_escaped",
                "why_a_model_fails_is_escaped",
                "what_a_gateway_answers_is_escaped",
            ],
            "unit/test_printable": [
                "a_line_of_the_log_is_one_line_and_a_traceback_is_none_of_it",
                "what_triton_says_is_said_escaped",
            ],
        },
    ),
    Row(
        "thousands of unknown model names",
        "not one more series of metrics",
        {"integration/test_observability": ["unknown_names_add_no_series"]},
    ),
    Row(
        "keys in requests that fail, `Connection` headers that name the key's",
        "no key in logs, metrics, traces and errors, nor at Triton",
        {
            "integration/test_auth": [
                "no_key_reaches_triton_or_a_log_line_or_a_metric",
                "no_key_is_in_a_trace",
            ],
            "integration/test_v2": ["only_the_headers_that_are_tritons_business_reach_it"],
        },
    ),
    Row(
        "exceptions provoked in a model",
        "their reason without paths, stacks, addresses and names of shared memory",
        {
            "integration/test_infer": ["an_exception_in_a_model_tells_its_reason_and_nothing_else"],
            "integration/test_v2": ["an_error_after_events_tells_nothing_of_the_inside"],
            "unit/test_complaints": ["what_helps_nobody_is_scrubbed"],
        },
    ),
    Row(
        "requests that once stopped everything: unfinished shapes, archives that inflate, images of "
        "fill bytes or thousands of scans, 100,000 keys, long content types",
        "4xx, or 503 at the deadline; meanwhile 99 of 100 `/livez` within 100 ms, and 99 of 100 "
        "inferences with another model within 20 ms, or three times the usual",
        {
            "faults/test_stalls": [
                "a_hostile_request_is_refused_and_the_next_one_served",
                "hostile_requests_stall_nobody",
            ]
        },
    ),
    Row(
        "callers of a model that can be cancelled leave at any moment, fifty thousand times",
        "what is short ends by itself, the rest is cancelled 0.1 to 0.6 s later; Triton goes on",
        {
            "integration/test_cancellation": [
                "tritonserver_outlives_fifty_thousand_that_leave_at_any_moment"
            ]
        },
    ),
    Row(
        "large uploads that never end",
        "429 when they hold `GATEWAY_MAX_BYTES_IN_FLIGHT`; small requests are served",
        {"faults/test_stalls": ["uploads_that_fill_the_budget_leave_small_requests_alone"]},
    ),
)

ROWS: dict[str, tuple[Row, ...]] = {
    "Triton and the network": TRITON,
    "The gateway and its clients": OURSELVES,
    "Bad input": BAD_INPUT,
    "Attacks": ATTACKS,
}
