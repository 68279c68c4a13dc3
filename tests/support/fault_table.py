"""Faults, their expected outcomes and the tests that show them; `make faults` runs these tests."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A fault, its expected outcome, and the tests that show it, by their files below tests/."""

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
        "502 or 503 for requests in progress, then 503 with `Retry-After` within 10 ms; `/readyz` "
        "returns 503, `/livez` 200; requests are served again within 2 s of its return",
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
        "only its requests in progress fail; its models are loaded again when it is back",
        {
            "system/test_fleet_failures": [
                "one_of_three_killed_costs_only_the_requests_that_it_had_and_comes_back"
            ]
        },
    ),
    Row(
        "a Triton accepts requests and never responds",
        "its requests in progress time out with 504, then it is ejected; other replicas are not "
        "affected",
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
        "a Triton cannot be connected to: refused, dropped, reset",
        "another replica responds, at most 0.5 s later",
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
        "it receives at most a quarter of its share",
        {
            "faults/test_upstream": ["a_replica_that_is_500_ms_slower_gets_a_quarter_of_its_share"],
            "integration/test_fleet_simulation": [
                "a_slow_replica_gets_little_and_costs_the_callers_little"
            ],
        },
    ),
    Row(
        "a response is garbage, truncated, of the wrong length, or followed by another one",
        "502, or a visibly truncated response if it had already started; its connection is not "
        "reused, and no client receives another client's response",
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
        "a response arrives byte by byte",
        "it is forwarded byte for byte",
        {
            "faults/test_upstream": ["an_answer_in_pieces_is_right_byte_for_byte"],
            "unit/test_http": ["an_answer_is_read_the_same_wherever_it_is_cut"],
        },
    ),
    Row(
        "Triton closes an idle connection while it is being reused",
        "200 or 502; no request runs twice",
        {
            "faults/test_upstream": ["a_connection_that_closes_as_it_is_reused_runs_nothing_twice"],
            "unit/test_http": [
                "a_connection_that_closes_as_it_is_reused_runs_its_request_at_most_once"
            ],
        },
    ),
    Row(
        "a model's queue in Triton is full",
        "429 with `Retry-After`; other models are not affected",
        {
            "faults/test_triton_faults": [
                "a_full_queue_of_a_model_is_429_and_other_models_are_served"
            ]
        },
    ),
    Row(
        "a model is unloaded without the gateway's knowledge",
        "503 within 1 s, or the response of another Triton that has it; other models are not affected",
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
        "other models are served at their usual speed",
        {"system/test_fleet_models": ["a_slow_load_disturbs_no_other_model"]},
    ),
    Row(
        "a load fails: an invalid config, no version, an exception at startup",
        "422 with Triton's reason, without its paths; the loaded version keeps serving",
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
        "a staged load fails on a replica",
        "502 names the replica; the others are not loaded, and all keep serving what they had",
        {
            "system/test_staged_load": [
                "a_failure_stops_a_staged_load_and_says_where",
                "what_is_loaded_keeps_serving_while_a_staged_load_fails",
                "a_probe_that_fails_stops_the_load",
            ]
        },
    ),
    Row(
        "the gateway is killed or restarted during a staged load",
        "the replicas that it had not reached keep what they had; nothing loads the model there",
        {
            "system/test_staged_load": [
                "a_gateway_that_is_killed_during_a_staged_load_leaves_the_rest_as_it_was"
            ],
            "integration/test_fleet_simulation": [
                "a_staged_load_that_a_gateway_did_not_finish_is_not_finished_by_the_next"
            ],
        },
    ),
    Row(
        "a version that a label means is unloaded, or its Triton or the gateway restarts",
        "the other versions of a split take its share; a label without a ready version is 503 until "
        "it has one again",
        {
            "integration/test_labels": [
                "a_version_that_disappears",
                "a_split_answers_while_a_version_of_it_goes_and_comes",
            ]
        },
    ),
    Row(
        "a shadow version hangs, fails or responds differently",
        "no request notices; the results are counted, and further copies are dropped",
        {
            "integration/test_shadows": [
                "a_slow_shadow_delays_no_request",
                "a_shadow_at_full_load_does_not_change_the_p99",
                "other_results_are_counted_as_what_they_are",
                "a_busy_gateway_copies_one_percent_and_one_at_its_limit_none",
            ]
        },
    ),
    Row(
        "fifty concurrent loads and unloads of one model",
        "they run one after another; the last one takes effect",
        {
            "system/test_fleet_models": ["fifty_calls_for_one_model_end_as_the_last_of_them_says"],
            "integration/test_fleet_simulation": [
                "many_loads_and_unloads_of_a_model_follow_one_another"
            ],
        },
    ),
    Row(
        "a load reaches two of three Tritons",
        "502 with a report per replica; requests go only to those two; the load is completed within "
        "15 s",
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
        "the new shape applies at once, or from the first response that contradicts the old one; "
        "nothing is reshaped",
        {"integration/test_models": ["a_model_replaced_by_one_of_another_shape_is_seen"]},
    ),
    Row(
        "the load of an on-demand model fails",
        "422 with Triton's reason for all requests that waited, after one attempt; further attempts "
        "are 1 s, 2 s, up to 5 minutes apart",
        {"system/test_on_demand": ["a_model_whose_load_fails_costs_one_attempt"]},
    ),
    Row(
        "the only Triton with an on-demand model is killed",
        "the model is loaded on another one; only requests in progress fail",
        {"system/test_on_demand": ["a_model_is_loaded_elsewhere_when_its_only_replica_vanishes"]},
    ),
    Row(
        "no Triton is up, with `GATEWAY_HOLD_S`",
        "requests wait, 14 KiB each, and are answered by the first Triton; 503 after that time, 429 "
        "above `GATEWAY_MAX_QUEUE`",
        {
            "system/test_from_zero": [
                "a_hundred_requests_wait_for_the_first_replica",
                "waiting_requests_take_little_memory",
                "requests_that_waited_in_vain_are_503",
                "more_requests_than_places_are_429",
            ]
        },
    ),
    Row(
        "a Triton's metrics page hangs or is garbage",
        "`/metrics` is complete within 2 s without its samples, and reports it as down",
        {
            "integration/test_metrics_page": [
                "a_replica_that_is_dead_hangs_or_talks_nonsense_costs_only_its_own_samples"
            ]
        },
    ),
    Row(
        "a response is valid HTTP but not a Triton response: JSON of other types, shapes and names",
        "502, or 200 if it can be read",
        {
            "faults/test_replica_answers": [
                "an_inference_that_cannot_be_read_is_502",
                "texts_in_json_are_read_as_such",
                "metadata_that_cannot_be_read_is_502",
                "a_message_of_a_stream_that_cannot_be_read_is_502",
            ],
            "unit/test_on_demand_plan": ["a_config_that_is_none_says_nothing"],
        },
    ),
    Row(
        "a replica's repository index takes longer than a probe, as with many models in a bucket",
        "it is up while it is alive, and its index is read less often",
        {
            "integration/test_fleet_simulation": [
                "a_replica_with_a_slow_index_is_up_and_its_index_is_read_seldom"
            ],
            "integration/test_bucket_uploads": ["a_triton_with_many_models_in_a_bucket_is_up"],
        },
    ),
    Row(
        "a replica lists more than 50,000 models",
        "it gets no requests while another replica can serve them; `/v1/replicas` says why",
        {
            "faults/test_replica_answers": ["an_index_of_too_many_models_is_not_used"],
            "integration/test_fleet_simulation": [
                "a_slow_index_that_becomes_invalid_makes_a_live_replica_unavailable"
            ],
        },
    ),
    Row(
        "a response does not end, or is larger than the limit",
        "502 from `/v1`, with at most `GATEWAY_MAX_ANSWER_BYTES` in memory; `/v2` streams it",
        {
            "faults/test_replica_answers": ["an_answer_without_an_end_is_502_and_not_kept"],
            "faults/test_shield": [
                "an_answer_that_is_too_large_to_hold_is_502_and_costs_nobody_else"
            ],
            "unit/test_sse": ["an_error_that_does_not_end_is_cut"],
        },
    ),
    Row(
        "DNS returns new addresses, none, or an error",
        "new addresses are used from the next lookup on; otherwise the last known ones are kept",
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
        "SIGTERM under load, rolling restarts",
        "`/readyz` returns 503 first, then requests in progress finish; no request fails",
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
        "the other workers serve, it is replaced, and its requests in progress are no longer counted",
        {
            "system/test_workers": ["a_killed_worker_is_replaced_while_the_other_serves"],
            "faults/test_gateway_faults": [
                "what_a_killed_worker_was_doing_is_not_counted_for_ever"
            ],
        },
    ),
    Row(
        "the supervisor of the workers is killed, or the process that they are forked from",
        "the workers finish their requests and exit; in the second case others replace them",
        {
            "system/test_workers": [
                "the_workers_stop_when_their_supervisor_is_killed",
                "workers_are_replaced_after_the_process_they_are_forked_from_is_killed",
            ],
        },
    ),
    Row(
        "32 images of 25 megapixels at once",
        "all are answered; 99 of 100 `/livez` requests take less than 100 ms, and at most 100 "
        "megapixels are in memory",
        {
            "faults/test_gateway_faults": [
                "thirty_two_images_of_25_megapixels_do_not_hold_up_the_loop"
            ],
            "integration/test_images": ["large_images_do_not_hold_up_others"],
        },
    ),
    Row(
        "no file descriptors are left",
        "connections are rejected without busy-waiting, and accepted again afterwards",
        {"integration/test_serve_process": ["it_sheds_and_recovers_when_there_are_no_descriptors"]},
    ),
    Row(
        "the state file is damaged, cannot be written, or its disk is full",
        "an error message at startup; later, the change is rejected with 503, and no stored state "
        "is lost",
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
        "serving continues with the last known state; changes are rejected with 503 meanwhile",
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
        "within 15 s every Triton serves what was requested last, every gateway reports it, and "
        "nothing flaps; other models are not affected",
        {
            "system/test_fleet_random": [
                "a_fleet_of_two_gateways_comes_to_rest_whatever_happens",
                "a_fleet_of_two_gateways_comes_to_rest_two_hundred_times",
            ]
        },
    ),
    Row(
        "a gateway exits in the middle of a load, or a Triton misses one",
        "the leading gateway finishes it, also after a restart; an older version that is ready "
        "there does not count",
        {
            "integration/test_fleet_simulation": [
                "a_load_that_a_replica_missed_is_made_good",
                "a_load_that_a_gateway_did_not_finish_is_finished_by_the_next",
                "gateways_that_load_at_once_come_to_rest",
            ]
        },
    ),
    Row(
        "a misspelled or slow model is added to the models file",
        "every gateway stays ready and reports the model as pending",
        {
            "integration/test_fleet_simulation": [
                "what_is_declared_while_the_gateway_runs_counts_once_it_was_ready"
            ]
        },
    ),
    Row(
        "the clock is set back or forward by an hour, on the gateway or in Redis",
        "no key is locked out, and all rate limits stay the same",
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
        "requests are served as before; log lines are dropped, counted and reported as missing; the "
        "gateway exits in time",
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
        "a disk, a thread or the event loop hangs during shutdown",
        "the gateway exits when `GATEWAY_DRAIN_S` and `GATEWAY_SHUTDOWN_S` are over, at most 5 s "
        "later, and logs it",
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
        "at least 90 and 80 % of the capacity is still served; the others are rejected within "
        "milliseconds; normal operation 5 s later",
        {"faults/test_load": ["more_than_its_capacity_costs_it_none_of_it"]},
    ),
    Row(
        "5,000 idle connections",
        "at most 100 MiB; other clients are not affected",
        {
            "faults/test_load": [
                "five_thousand_idle_connections_cost_little_and_nobody_else_anything"
            ]
        },
    ),
    Row(
        "requests of all kinds for a long time",
        "memory grows by less than 1 MiB per 10,000; file descriptors and threads do not grow",
        {"faults/test_load": ["ten_thousand_requests_of_all_kinds_leave_nothing_behind"]},
    ),
    Row(
        "a client disconnects",
        "its concurrency slot is free within 200 ms, and its upstream request is closed",
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
        "a client does not read its response",
        "it is disconnected after 30 s; memory stays bounded",
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
        "bodies over the limit, with a length or chunked",
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
        "invalid or several lengths, or a length with chunks; no `Host` header, or two",
        "400, and the connection is closed",
        {
            "unit/test_hardening": ["what_could_be_read_in_two_ways_is_refused"],
            "unit/test_protocol": ["garbage_is_refused_and_not_listened_to_again"],
        },
    ),
    Row(
        "headers of 1 MB, 5,000 fields, a URL of 60 KB",
        "431 or 414 while they arrive, with bounded memory",
        {
            "unit/test_hardening": [
                "what_is_too_large_is_refused_while_it_comes",
                "what_is_too_large_is_refused_in_small_pieces",
                "a_header_without_an_end_fills_no_memory",
            ]
        },
    ),
    Row(
        "JSON with NaN, 1e999, a lone surrogate, invalid UTF-8, a depth of 100,000, an integer of "
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
        "forms that are truncated or have 2,000 fields, a file called ../../etc/passwd",
        "400 or 413; a file name is never used as a path",
        {
            "integration/test_infer": ["a_form_that_is_none", "a_file_name_is_only_a_name"],
            "integration/test_demo": ["a_large_form_leaves_no_file"],
        },
    ),
    Row(
        "images that are invalid, truncated, of another format, or claim 13,000 × 13,000 pixels",
        "422, or 413 before a pixel is decoded",
        {
            "integration/test_images": ["an_image_that_is_none"],
            "integration/test_demo": ["junk_instead_of_an_image_is_422_with_a_sentence"],
            "unit/test_digits": ["damaged_bytes_never_raise_anything_but_a_picture_error"],
        },
    ),
    Row(
        "CMYK, palettes with transparency, 16-bit grayscale, EXIF orientation",
        "decoded to the image that a person sees",
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
        "400, or 413 for an archive that decompresses beyond the limit",
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
        "images, NumPy files, archives and forms that contradict themselves, or are small but "
        "expensive to decode",
        "a 4xx with the reason, before a library reads them; metadata is not read; other requests "
        "are served meanwhile",
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
        "headers, texts, values and files that make a parser rescan its input",
        "the cost is linear in the length, whatever they contain",
        {"unit/test_linear_cost": ["the_cost_is_linear"]},
    ),
    Row(
        "texts that are empty, of 1 MB, with NUL, combining marks, emoji",
        "they arrive unchanged",
        {"integration/test_infer": ["texts_pass_as_utf8", "bytes_pass_as_they_are"]},
    ),
    Row(
        "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count, range "
        "or batch",
        "422 with the input's name, what was expected and what was received; never changed silently",
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
        "names with ../, %00, CR and LF, of 300 characters; invalid versions",
        "404, and nothing else is requested from Triton",
        {
            "integration/test_infer": ["a_name_that_is_none_is_404"],
            "integration/test_demo": ["an_unknown_version_is_404"],
            "integration/test_v2": ["what_triton_does_not_have_is_refused_in_our_words"],
        },
    ),
    Row(
        "deadlines of 0, −1, `abc`, 1e9 s",
        "400; a deadline that is too long is clamped",
        {
            "integration/test_infer": [
                "a_deadline_that_cannot_be_is_400",
                "a_deadline_that_is_too_long_is_clamped",
            ]
        },
    ),
    Row(
        "an `Accept` header that nothing satisfies",
        "406",
        {"integration/test_infer": ["an_accept_that_nothing_satisfies_is_406"]},
    ),
    Row(
        "invalid gzip, or 10 MB of gzip that decompress to 10 GB",
        "400; 413 at the limit, with no more than that in memory",
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
        "request smuggling through nginx, in upgrades, in trailers",
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
        "little CPU time and a small response",
        {
            "faults/test_bad_input": [
                "65_537_chunks_of_six_bytes_are_a_body",
                "json_with_100_000_keys_costs_little",
            ]
        },
    ),
    Row(
        "requests that crash a Triton or keep it busy for minutes: a form content type, lengths and "
        "weights in headers, small chunks, compressed bodies that it rejects, JSON keys",
        "400, or sanitized before forwarding; Triton keeps running, and similar harmless requests "
        "pass",
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
        "250 KiB made to be expensive to inspect",
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
        "404, and Triton is not called",
        {
            "faults/test_shield": [
                "what_is_no_version_reaches_nobody",
                "what_is_no_name_of_a_model_reaches_nobody",
                "a_version_is_the_same_however_many_zeros_it_has",
            ]
        },
    ),
    Row(
        "a model or a replica returns pages, cookies, redirects",
        "they run no script and change nothing in a browser",
        {
            "faults/test_shield": [
                "an_answer_changes_nothing_in_a_browser",
                "a_page_that_a_model_answers_runs_no_script_here",
            ]
        },
    ),
    Row(
        "arbitrary bytes",
        "a complete response or a rejection; no hang",
        {"unit/test_hardening": ["no_bytes_make_it_hang_or_fail_or_tear_an_answer"]},
    ),
    Row(
        "more connections than allowed, from one client or many",
        "503 at once; health endpoints still respond",
        {
            "unit/test_hardening": [
                "one_connection_too_many_is_refused_and_health_can_still_be_asked",
                "far_too_many_connections_are_refused_at_once",
            ]
        },
    ),
    Row(
        "a load that includes code, without permission",
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
        "a proxy on the gateway's machine forwards administrative calls, whether it names the "
        "client or not",
        "403; the same for another user of the machine",
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
        "a web page resolves its own name to 127.0.0.1 (DNS rebinding)",
        "403 for all its requests to a gateway on loopback without keys",
        {
            "integration/test_local_admin": [
                "a_name_that_was_made_to_stand_for_this_machine_reads_and_infers_nothing",
                "every_worker_process_refuses_another_name",
            ]
        },
    ),
    Row(
        "somebody writes code into the state, in its file or in Redis",
        "ignored, with a warning that names the model, unless uploads are allowed",
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
        "a web page asks the embedded Triton directly to load code",
        "403; only the gateway has the secret, which every start generates",
        {
            "system/test_embedded_secret": [
                "a_page_or_another_user_manages_nothing_and_the_gateway_does",
                "grpc_is_closed_as_well",
                "a_triton_that_is_started_again_is_restricted_again",
            ]
        },
    ),
    Row(
        "no key, a key of another role, a key that lacks a character, a key that is revoked while "
        "in use",
        "401 or 403; a revoked key from the next reload of the file on",
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
        "404, as if it did not exist",
        {
            "integration/test_auth": [
                "a_model_that_the_key_does_not_see_is_as_unknown_as_one_that_is_not",
                "odd_names_are_no_way_around_the_patterns",
            ]
        },
    ),
    Row(
        "shared memory of the machine, however it is spelled",
        "403, or the response of a Triton that has none registered; it never reaches Triton",
        {"integration/test_v2": ["shared_memory_never_reaches_triton_however_it_is_spelled"]},
    ),
    Row(
        "`X-Forwarded-For` against the rate limits",
        "no effect",
        {"integration/test_rates": ["whom_a_proxy_says_it_asks_for_changes_nothing"]},
    ),
    Row(
        "CR, LF and escape sequences in paths, names and request IDs",
        "one line in the log, escaped",
        {"integration/test_observability": ["nothing_that_a_client_writes_ends_a_line"]},
    ),
    Row(
        "terminal control sequences in the output of a model, a Triton or a gateway",
        "escaped in everything that `up`, the log and the command line print",
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
        "thousands of unknown model names, and names that a server of completions accepts",
        "no additional metric series; at most 64 of a server of completions; the memory for names is "
        "bounded, and names of more than 256 characters are unknown",
        {
            "faults/test_gateway_faults": ["invented_names_of_models_are_forgotten"],
            "faults/test_grpc": ["long_names_of_models_are_unknown_and_not_kept"],
            "integration/test_observability": ["unknown_names_add_no_series"],
            "integration/test_completions": [
                "invented_names_that_a_server_accepts_are_few_metric_series"
            ],
        },
    ),
    Row(
        "keys in requests that fail, `Connection` headers that name the key's header",
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
        "their reason without paths, URLs, stack traces, pointers and shared memory names",
        {
            "integration/test_infer": ["an_exception_in_a_model_tells_its_reason_and_nothing_else"],
            "integration/test_v2": ["an_error_after_events_tells_nothing_of_the_inside"],
            "unit/test_complaints": ["what_helps_nobody_is_scrubbed"],
        },
    ),
    Row(
        "requests that once blocked the whole process: unfinished shapes, archives that decompress, "
        "images of fill bytes or thousands of scans, 100,000 keys, long content types",
        "4xx, or 503 at the deadline; meanwhile 99 of 100 `/livez` requests take less than 100 ms, "
        "and 99 of 100 inferences with another model at most three times the usual, apart from what "
        "Triton itself takes longer on the busy machine",
        {
            "faults/test_stalls": [
                "a_hostile_request_is_refused_and_the_next_one_served",
                "hostile_requests_stall_nobody",
            ]
        },
    ),
    Row(
        "callers of a cancellable model disconnect at any moment, fifty thousand times",
        "short inferences finish, the others are cancelled 0.1 to 0.6 s later; Triton keeps running",
        {
            "integration/test_cancellation": [
                "tritonserver_outlives_fifty_thousand_that_leave_at_any_moment"
            ]
        },
    ),
    Row(
        "a key for inference provokes errors of replicas, servers of completions and loads on demand",
        "no error contains an address, or the reason of a failed load, which can name other models; "
        "both are in the log",
        {
            "system/test_fleet_failures": ["no_error_tells_a_caller_the_address_of_a_replica"],
            "system/test_on_demand": ["a_key_for_inference_does_not_read_why_a_load_failed"],
        },
    ),
    Row(
        "documents of megabytes that a ranking returns",
        "charged to the memory budget, and encoded in a thread",
        {
            "faults/test_bad_input": [
                "documents_that_a_ranking_returns_are_charged_and_encoded_in_a_thread"
            ]
        },
    ),
    Row(
        "somebody writes anything else into Redis: other types, structures, names, counters",
        "what no gateway writes is invalid data, which is logged; the gateway serves on with the last "
        "valid state, and uses valid data again as soon as there is some",
        {
            "integration/test_state_redis": [
                "an_entry_that_no_gateway_writes_is_invalid_data",
                "a_gateway_survives_whatever_stands_in_redis",
                "a_rate_is_counted_whatever_stands_in_redis",
            ]
        },
    ),
    Row(
        "thousands of labels and of operations in the background, long names of load parameters",
        "64 labels of a model, 256 operations at a time and 10,000 in an hour; names are cut in the "
        "audit log",
        {
            "integration/test_operations": [
                "what_administrators_send_is_bounded",
                "operations_in_the_background_are_bounded",
            ]
        },
    ),
    Row(
        "many uploads at a time, whose lengths are unknown; archives of thousands of files",
        "507 as soon as they together exceed `GATEWAY_MAX_REPOSITORY_BYTES`, 429 for more than 16; "
        "only files of accepted uploads wait for the disk",
        {
            "integration/test_uploads": [
                "uploads_in_progress_share_the_quota",
                "sixteen_uploads_are_received_at_a_time",
                "an_archive_of_many_files_is_refused_quickly",
            ]
        },
    ),
    Row(
        "an uploaded config whose `gateway.probe` crashes a Triton",
        "the staged load fails with the error that the same body gets on `/v2`; it never reaches Triton",
        {"system/test_staged_load": ["a_probe_that_could_harm_triton_is_not_sent"]},
    ),
    Row(
        "the description of a model whose inputs have millions of values",
        "small, at little cost: its examples are written as products, and left out of its OpenAPI document",
        {"faults/test_stalls": ["a_model_with_large_tensors_is_described_at_little_cost"]},
    ),
    Row(
        "a flood of requests for the repository index, each of which probes every replica",
        "those that wait at the same time share the probes",
        {
            "integration/test_fleet_simulation": [
                "calls_for_the_index_share_the_probes_that_they_wait_for"
            ]
        },
    ),
    Row(
        "a response of one long text and thousands of short ones, which a shadow version repeats",
        "compared in memory that is linear in its bytes; a response that decompresses beyond the "
        "limit is not compared",
        {"integration/test_shadows": ["texts_of_any_length_are_compared_in_little_memory"]},
    ),
    Row(
        "large uploads that never end",
        "429 when they hold `GATEWAY_MAX_BYTES_IN_FLIGHT`; small requests are served",
        {"faults/test_stalls": ["uploads_that_fill_the_budget_leave_small_requests_alone"]},
    ),
)

GRPC = (
    Row(
        "a gRPC client does not read its stream",
        "it is disconnected after `GATEWAY_WRITE_TIMEOUT_S`; memory stays bounded",
        {"faults/test_grpc": ["a_client_that_does_not_read_its_stream_is_disconnected"]},
    ),
    Row(
        "thousands of gRPC streams on one connection",
        "`GATEWAY_GRPC_MAX_STREAMS` of them start; other clients are served",
        {"faults/test_grpc": ["a_flood_of_streams_leaves_other_clients_alone"]},
    ),
    Row(
        "gRPC messages over the limit, compressed ones that decompress beyond it, large metadata",
        "`RESOURCE_EXHAUSTED`, with bounded memory",
        {
            "faults/test_grpc": [
                "a_message_over_the_limit_is_refused",
                "a_compressed_message_over_the_limit_is_refused",
                "compressed_messages_are_served",
                "large_metadata_is_refused",
            ],
            "faults/test_grpc_strangers": ["compressed_messages_can_be_refused"],
        },
    ),
    Row(
        "gRPC streams with thousands of requests in progress, or idle after large ones",
        "if they take a quarter of the memory budget, a stream has one at a time; an idle stream holds no "
        "message",
        {
            "faults/test_grpc": ["streams_hold_a_bounded_number_of_requests"],
            "faults/test_grpc_strangers": ["idle_streams_hold_no_message"],
        },
    ),
    Row(
        "gRPC messages that never end, calls without a message, half-closed streams",
        "`RESOURCE_EXHAUSTED` when they hold `GATEWAY_MAX_BYTES_IN_FLIGHT`, or `DEADLINE_EXCEEDED` at "
        "their deadline; small requests are served, and streams whose requests run continue",
        {
            "faults/test_grpc": [
                "messages_that_never_end_hold_bounded_memory",
                "streams_whose_messages_never_end_hold_bounded_memory",
                "streams_whose_requests_run_are_not_ended_for_others",
                "calls_without_a_request_end",
            ]
        },
    ),
    Row(
        "gRPC calls without a key that send large or compressed messages, none, or thousands of calls",
        "the status of the gateway; the messages are not read, and at most 1,024 calls watch the health",
        {
            "faults/test_grpc_strangers": [
                "the_messages_of_strangers_are_not_read",
                "calls_that_watch_the_health_are_limited",
            ]
        },
    ),
    Row(
        "large messages of thousands of fields, or none, to the health service and reflection",
        "`INVALID_ARGUMENT` above 1 KiB and 4 KiB, `DEADLINE_EXCEEDED` after 5 s",
        {
            "faults/test_grpc_strangers": [
                "short_messages_of_many_fields_are_refused",
                "a_silent_call_of_a_short_message_ends_soon",
            ]
        },
    ),
    Row(
        "one client holds gRPC calls open, on any number of connections",
        "`RESOURCE_EXHAUSTED` beyond `GATEWAY_MAX_CONNECTIONS_PER_CLIENT`; other addresses are served",
        {"faults/test_grpc_strangers": ["one_client_cannot_hold_calls_without_limit"]},
    ),
    Row(
        "messages above 16 KiB, invalid ones and hundreds of streams at the external scaler",
        "`RESOURCE_EXHAUSTED`, `INVALID_ARGUMENT`; of one connection, 100 streams are served, and other "
        "connections",
        {"system/test_scaler": ["bad_clients_of_the_scaler_are_refused"]},
    ),
    Row(
        "bytes that are not the protobuf message of the method, unknown methods",
        "`INVALID_ARGUMENT`, `UNIMPLEMENTED`; Triton keeps running",
        {
            "faults/test_grpc": ["arbitrary_bytes_are_answered"],
            "integration/test_grpc": ["an_unknown_method_is_unimplemented"],
        },
    ),
    Row(
        "gRPC requests that crash a Triton: shapes that overflow, classes of texts, thousands of "
        "parameters and inputs, regions of shared memory",
        "`INVALID_ARGUMENT` or `PERMISSION_DENIED`; they never reach Triton",
        {
            "faults/test_grpc": [
                "requests_that_crash_triton_do_not_reach_it",
                "shared_memory_in_a_request_is_refused",
            ]
        },
    ),
    Row(
        "thousands of gRPC calls that are reset at once, pings without end",
        "other clients are served; GOAWAY for too many pings",
        {
            "faults/test_grpc": [
                "rapid_resets_leave_other_clients_alone",
                "a_client_that_pings_too_often_is_disconnected",
            ]
        },
    ),
    Row(
        "a Triton is killed while it serves a gRPC stream",
        "only its requests in progress fail, with messages of the stream; the stream continues on the "
        "other Tritons",
        {"faults/test_grpc": ["a_replica_that_is_killed_in_a_stream_costs_only_its_requests"]},
    ),
    Row(
        "the gateway is stopped while it serves gRPC calls and streams",
        "requests that it received are answered, then streams end with `UNAVAILABLE`",
        {"faults/test_grpc": ["a_gateway_that_is_stopped_answers_what_it_received"]},
    ),
)

ROWS: dict[str, tuple[Row, ...]] = {
    "Triton and the network": TRITON,
    "The gateway and its clients": OURSELVES,
    "Bad input": BAD_INPUT,
    "Attacks": ATTACKS,
    "gRPC": GRPC,
}
