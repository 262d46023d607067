"""Which tests only `make test-all` runs, and which cases of them `make test` runs as well.

`make test` is for every commit: 12 minutes on two cores. A grid (strategies × sizes × settings) keeps there the cases
that cover each part of the code once; the whole grid, and what takes long for a rare fault, is in `make test-all`. A
single test that is slow by nature may be marked `slow` where it stands. benchmarks/mutants.py measures what is lost.
"""

from __future__ import annotations

# file::function -> the parameters that `make test` keeps; () for none
LONG: dict[str, tuple[str, ...]] = {
    # each kind of strategy at its smallest size; 3d covers tensor, zero2 covers zero1
    "parity/test_parity.py::test_follows_one_process": (
        "3d-4", "ddp-2", "diloco-2", "fairscale-2", "fsdp-2", "local_sgd-2", "pipeline-2", "ps-2", "ring-2", "zero2-2",
        "zero3-2",
    ),
    "parity/test_parity.py::test_half_precision": (
        "ddp-fp16", "fsdp-bf16", "zero1-bf16", "zero1-fp16",
    ),
    "parity/test_parity.py::test_memory_settings_do_not_change_the_maths": (),
    "parity/test_parity.py::test_bf16_means_the_same_under_every_strategy": (),
    "parity/test_accumulation.py::test_what_a_step_reduces": ("ddp", "ring", "fsdp"),
    "comm/test_context.py::test_losses_and_gradients_are_those_of_one_process": ("some",),
    "strategies/test_context.py::test_a_checkpoint_moves_to_and_from_other_layouts": ("ring-ddp",),
    "strategies/test_context.py::test_other_settings_keep_the_maths": ("loss",),
    # local_sgd, diloco and fairscale have a resume of their own in tests/strategies
    "parity/test_resume.py::test_sigkill_and_resume_is_bit_exact": ("ddp-4", "fsdp+state-int8-2"),
    "parity/test_exchange.py::test_a_save_on_the_way_changes_nothing": ("ddp", "fsdp"),
    "parity/test_exchange.py::test_takes_over_from": ("3d",),  # strategies/test_deepspeed.py has the state of ZeRO
    "strategies/test_variants.py::test_same_maths": (
        "fsdp-4-strategy.sharding=hybrid,strategy.replica_size=2", "fsdp-2-strategy.offload=cpu",
        "tensor-2-strategy.sequence_parallel=true,strategy.loss_parallel=true",
        "pipeline-2-strategy.schedule=zbv",
        "pipeline-2-strategy.schedule=gpipe,strategy.split=[1]",
    ),
    "strategies/test_variants.py::test_a_resume_is_bit_exact_also_with_dropout": (),
    "strategies/test_base.py::test_compile_keeps_the_maths": (),
    "strategies/test_base.py::test_first_weights_are_the_same_whatever_the_layout": (),
    "strategies/test_base.py::test_fp16_scale_falls_at_an_overflow_and_training_goes_on": ("ddp", "pipeline"),
    "strategies/test_base.py::test_nonfinite_stops_before_the_update_and_is_never_saved": (
        "inf-ddp", "nan-fsdp", "nan-pipeline", "nan-zero2",
    ),
    "strategies/test_checkpointing.py::test_a_run_is_the_same_with_ops": ("ddp",),
    "strategies/test_checkpointing.py::test_one_compiled_graph_has_the_recomputation_in_it": (),
    "strategies/test_deepspeed.py::test_a_run_moves_through_the_stages": (),
    "strategies/test_deepspeed.py::test_nvme_keeps_the_maths_and_the_state": (),
    "strategies/test_deepspeed.py::test_a_step_that_is_not_finite_leaves_everything_alone": ("zero3",),
    "strategies/test_fairscale.py::test_oss_follows_one_process_and_its_checkpoint_moves": (),
    "strategies/test_fairscale.py::test_oss_resumes_bit_exact": (),
    "strategies/test_fairscale.py::test_each_weight_has_one_owner": (),
    "strategies/test_fsdp.py::test_gradients_of_a_pass_are_cut_unless_whole_weights_stay": (
        "full-True", "grad_op-False",
    ),
    # torch takes 6 s of a CPU for each
    "inference/test_export_onnx.py::test_onnxruntime_computes_the_same": ("gpt2",),  # the file has an image model, too
    "commands/test_generate.py::test_killed_at_any_moment_it_ends_with_the_same_bytes": (),
    # test_examples.py trains a model of transformers under fsdp, data/test_stream.py stops a run with its own data
    "models/test_hugging_face.py::test_every_strategy_follows_and_a_resume_is_exact": (),
    "data/test_adapt.py::test_a_stopped_run_goes_on_exactly_and_another_strategy_follows": (),
    # each kind of model and data once; importing transformers or scikit-learn takes seconds
    "test_examples.py::test_a_script_trains": (
        "custom_collate-ddp", "dict_batches-fsdp", "gpt2_tied-fsdp", "iterable_workers-ddp", "lightning_module-ddp",
        "nanogpt-fsdp", "torchvision_resnet-ddp",
    ),
    # Hugging Face data take seconds to import; Drawing has random draws and no state, Stateful has a state
    "data/test_stream.py::test_every_rank_count_sees_the_same_batches_and_a_resume_goes_on_exactly": (
        "Drawing", "Stateful", "Shards", "WithSplit",
    ),
    "data/test_stream.py::test_a_shuffle_with_the_default_buffer_is_read_again_exactly": (),
    "data/test_stream.py::test_killed_and_resumed_it_is_bit_exact_also_with_other_ranks": ("ddp-Drawing-fsdp",),
    "strategies/test_local_sgd.py::test_stays_within_its_own_tolerance": (),
    "strategies/test_local_sgd.py::test_averaging_every_step_is_ddp_for_plain_sgd_only": (),
    "strategies/test_diloco.py::test_exchanging_every_step_is_ddp_for_sgd": ("2",),
    "strategies/test_lora_base.py::test_the_same_maths": ("pipeline-2-options2",),
    "strategies/test_lora_base.py::test_fsdp_gathers_weights_of_two_types": (),
    "strategies/test_lora_base.py::test_adapters_begin_beside_the_weights_of_another_run": (),
    "strategies/test_lora_base.py::test_holding_frozen_weights_in_16_bits_keeps_every_bit": ("bf16",),
    "strategies/test_replicas.py::test_replicas_that_differ_are_never_saved": ("model.norm.weight-0-6", "missed-1-5"),
    # what a comparison costs in bits is nothing: the parity tests run with it, too
    "train/test_guard.py::test_the_checks_change_no_bit": (),
    "train/test_hooks.py::test_all_methods_under_a_strategy_and_after_a_kill": ("fsdp",),
    "train/test_stragglers.py::test_stops_are_own_time": (),  # the same file has a slow rank in a real run
    "train/test_hooks_page.py::test_the_page": ("ddp-1", "fsdp-2"),
    "train/test_hooks.py::test_what_a_hook_may_not_return": ("Apart-words0-2", "ReturnsText-words2-1"),
    "train/test_guard.py::test_the_same_run_with_batch_norm_and_accumulation": (),
    "train/test_update_sums.py::test_only_updates_and_loads_write_weights_and_optimizer_state": (),
    "train/test_spikes.py::test_skip_leaves_the_weights_alone": (),
    "train/test_spikes.py::test_a_second_spike_at_the_same_step_stops": (),
    "strategies/test_replicas.py::test_ranks_skip_together_and_a_flipped_bit_is_found": (),
    "strategies/test_lora_base.py::test_adapters_move_between_strategies_and_are_all_that_is_saved": (),
    "strategies/test_buckets.py::test_a_resume_keeps_the_choice_and_other_ranks_measure_again": (),
    "strategies/test_diloco.py::test_resume_is_bit_exact_where_a_save_is_not_an_outer_step": (),  # local_sgd has one
    "launch/test_elastic.py::test_a_survivor_that_holds_a_copy_saves_it": (),
    "launch/test_elastic.py::test_too_few_ranks_end_the_run_saved": (),
    "launch/test_slurm_odd.py::test_a_node_whose_cpu_lacks_fp16_says_so_and_the_login_node_does_not": (),
    "launch/test_slurm_start.py::test_a_job_beside_such_files": (),  # launch/test_start.py has it without SLURM
    "test_old_runs.py::test_every_command_reads_an_old_run": ("fsdp",),
    "train/test_spikes.py::test_stop": ("False",),
    "train/test_spikes.py::test_a_resume_finds_the_same_spike": (),
    "train/test_spikes.py::test_a_rollback_survives_a_stop_and_late_results": (),
    "train/test_spikes.py::test_many_in_a_row_are_no_spikes": (),
    "train/test_spikes.py::test_a_rollback_to_the_start_of_a_fork_begins_its_new_optimizer_again": (),
    "kernels/test_gelu.py::test_in_a_compiled_layer_with_and_without_recomputation": (),
    "kernels/test_gelu.py::test_a_graph_that_ddp_cuts_at_its_buckets": (),
    "kernels/test_gemm_pass.py::test_a_bias_that_is_no_row_is_left_to_torch": (),
    "kernels/test_gemm_pass.py::test_layers_share_a_graph": (),
    "kernels/test_gemm_pass.py::test_the_gradient_of_a_weight_is_written_in_float32": (),
    "kernels/test_gemm_pass.py::test_small_products_and_wide_types_are_left_to_torch": (),
    "kernels/test_gemm_pass.py::test_all_products_of_both_graphs_are_taken_and_values_stay": (),
    "kernels/test_cross_entropy.py::test_training_is_the_same_with_it": (
        "one process", "zero2",
    ),
    "models/test_packed.py::test_packed_runs_follow_one_process": ("gpt2-pipeline",),
    "models/test_user_model.py::test_a_batch_norm_of_torch_goes_on_where_it_was": (),
    "models/test_user_model.py::test_a_plain_module_follows_one_process_under_every_strategy": ("fsdp", "zero3"),
    "models/test_resnet.py::test_two_ranks_follow_one_process": (),
    "models/test_convnet.py::test_the_recipe_learns_the_digits": (),
    "models/test_large.py::test_llama_70b_under_3d": (),
    "models/test_large.py::test_llama_7b_under_fsdp": ("8",),
    "models/test_large.py::test_loss_parallel_also_cuts_the_vocabulary": (),
    # two ranks, a kill and a resume, all compiled; the others in the file have the parts, without a launch
    "kernels/test_compile_cache.py::test_of_two_ranks_one_compiles_and_after_a_kill_both_load": (),
    "models/test_resnet.py::test_a_resume_is_exact_and_another_strategy_goes_on_with_the_same_statistics": (),
    "models/test_resnet.py::test_it_learns_the_digits": (),
    "models/test_vit.py::test_it_learns_the_digits": (),
    "models/test_llama.py::test_llama_tiny_learns_real_text": (),
    "models/test_bert.py::test_tensor_parallel_plan_keeps_loss_and_gradients": (),
    "models/test_bert.py::test_learns_to_tell_code_comments_and_docstrings_apart": (),
    "models/test_bert.py::test_learns_to_fill_in_masked_bytes": (),
    "optim/test_precision.py::test_checkpoints_pass_between_bf16_and_bf16_pure": (),
    "optim/test_precision.py::test_bf16_pure_follows_bf16_and_is_one_under_ddp_and_fsdp": (),
    "checkpoint/test_initial_weights.py::test_every_layout_begins_with_the_same_weights": (),
    "checkpoint/test_store.py::test_a_disk_without_a_byte_left_is_exit_code_3_and_says_so": (),
    "checkpoint/test_store.py::test_50_random_kills_lose_no_acknowledged_checkpoint": (),
    "checkpoint/test_store.py::test_sigkill_at_each_phase_loses_no_acknowledged_checkpoint": (
        "true-save.copied", "false-save.manifest",
    ),
    "checkpoint/test_background.py::test_a_run_saves_the_same_bits_while_it_goes_on": (
        "strategy=fsdp",
    ),
    "checkpoint/test_incremental.py::test_strategies_take_over_from_each_other": (),
    "checkpoint/test_peer.py::test_a_killed_run_resumes_from_memory": ("prune:6-ddp",),
    "checkpoint/test_peer.py::test_a_lost_host_loses_nothing": ("abc-b",),
    "inference/test_export.py::test_a_run_goes_to_transformers_and_back": ("gpt2", "bert-classify"),
    "profile/test_profile.py::test_the_parts_add_up_to_the_step_on_two_ranks": ("ddp",),
    # every model, every file of conf/hardware
    "plan/search/test_search.py::test_every_model_that_is_shipped_can_be_planned_for": (
        "gpt2-1.5b", "llama-70b", "resnet50",
    ),
    "plan/test_model_shape.py::test_stages_are_those_of_the_pipeline": (
        "2-bert-large", "4-gpt2-1.5b", "4-llama-7b", "2-vit-b16",
    ),
    "plan/time/test_step.py::test_tensor_ranks_send_what_is_predicted": ("False-gpt2", "True-llama"),
    "commands/plan/test_command.py::test_every_hardware_file_can_be_planned_for": ("a100-80gb", "h100"),
    "preflight/test_network_env.py::test_every_hardware_can_be_chosen": ("a100-80gb", "cpu", "h100"),
    "config/test_hardware.py::test_a_section_is_what_hydra_composes": ("a100-80gb", "cpu", "h100"),
    "plan/calibrate/test_command.py::test_this_machine_is_measured_and_written": (),
    "plan/memory/test_activations.py::test_a_compiled_block_saves_what_the_partitioner_says": (),
    "data/test_prefetch.py::test_a_long_tmpdir_is_no_place_for_sockets": (),
    # a server of its own each; the others share one
    "commands/test_serve.py::test_hot_swap_under_load_loses_no_request": (),
    "commands/test_serve.py::test_a_key_is_checked": (),
    "commands/test_serve.py::test_a_server_that_is_asked_to_end_finishes_what_it_has_begun": (),
    "commands/test_serve.py::test_a_template_is_used_only_if_the_user_names_it": (),
    "commands/test_serve.py::test_texts_are_classified": (),
    "commands/test_generate.py::test_two_processes_write_what_one_writes": (),
    "launch/test_fork.py::test_a_launch_that_ended_before_it_went_back_is_forgotten": (),
    "launch/test_fork.py::test_a_run_does_not_resume_in_another_folder": (),
    # each kind of mistake once; those that are found before the ranks start take milliseconds
    "test_mistakes.py::test_a_mistake_is_explained": (
        "a-misspelt-class", "the-same-with-data-that-needs-model.seq_len", "a-misspelt-module", "only-the-class",
        "the-file-instead-of-the-class", "a-misspelt-loss", "a-misspelt-optimizer-of-torch", "a-syntax-error",
        "a-value-instead-of-a-class", "a-missing-package", "a-wrong-shape", "batch-gives-fewer", "lists",
        "no-samples", "NaN-in-one-sample", "layers-in-a-plain-list", "a-detached-output", "a-misspelt-argument",
        "an-optimizer-without-a-return", "a-schedule-that-gives-5", "fewer-samples-than-a-batch",
        "a-data-set-that-is-made-at-import", "no-model-for-own-data",
        "a-loss-as-a-number", "a-model-with-a-loss-of-its-own", "no-targets",
        "an-unused-layer-on-two-ranks", "a-weight-that-forward-makes", "a-forward-that-needs-targets",
    ),
    # recipes: each composes and shows its command; these also train
    "test_recipes.py::test_a_twin_trains": (
        "tiny/vit-imagenet-ddp",
    ),
    "test_fit.py::test_the_script_of_the_page_follows_its_command_under_another_strategy": (),
    "test_fit.py::test_ctrl_c_saves_and_ends_the_script_with_75": (),
    "test_fit.py::test_a_script_that_does_not_guard_its_call_is_told_by_its_ranks": (),
    "commands/verify/test_command.py::test_by_default_every_strategy_at_its_two_smallest_sizes": (),
    "commands/verify/test_command.py::test_deepspeed_in_fp16_runs_or_is_left_out_as_the_cpu_can": (),
    "commands/verify/test_command.py::test_a_rank_that_fails_or_hangs": (
        "strategy0-rank 0: RuntimeError: no such wire",
    ),
    "commands/verify/test_command.py::test_ctrl_c_ends_quietly_and_takes_the_ranks_along": ("True-2",),
    "commands/search/test_optuna_search.py::test_a_point_that_is_refused_is_a_trial_that_came_to_nothing": (),
    "commands/search/test_optuna_search.py::test_the_same_command_goes_on_with_the_study": (),
    # the same driver on forked ranks, without the launcher, is in the same file
    "commands/search/test_driver.py::test_killing_the_search_ten_times_changes_nothing": (),
    "commands/search/test_driver.py::test_a_model_of_the_users_own_is_promoted": (),
    "commands/search/test_driver.py::test_asha_on_slurm": (),
    "commands/search/test_driver.py::test_asha_on_ray": (),
    "commands/search/test_optuna_search.py::test_on_slurm_it_goes_on_without_the_terminal": (),
    "test_nfs.py::test_two_ranks_save_and_resume": (),
    "runs/test_causes.py::test_a_real_collective_that_lost_its_peer_is_evidence": (),
    "launch/test_kubernetes.py::test_what_no_restart_mends_is_not_restarted": (),
    "loggers/test_follow.py::test_a_server_that_does_not_answer_is_given_up_and_named": ("silent",),
    # launches: torchrun and its ranks import torch anew each time
    "launch/test_local.py::test_a_signal_saves_at_the_step_boundary_and_ends_with_75": ("15",),
    "launch/test_local.py::test_killing_the_launcher_while_it_starts_leaves_no_orphans": ("2.5",),
    # parity/test_exchange.py resumes under another strategy and size, test_fit.py through the launcher
    "launch/test_local.py::test_resume_under_another_strategy_and_world_size": (),
    "launch/test_local.py::test_a_sweep_ends_in_one_table": (),  # launch/test_app.py has sweeps that train nothing
    "launch/test_local.py::test_a_second_signal_ends_it_at_once": (),
    "launch/test_local.py::test_a_host_name_that_does_not_resolve_costs_nothing": (),
    "launch/test_local.py::test_a_run_that_is_running_is_not_resumed": (),
    "launch/test_local.py::test_a_failed_resume_leaves_the_configuration_as_it_was": (),
    "launch/test_local.py::test_two_signals_of_a_scheduler_are_one_request": (),
    # runs/test_causes.py has an error, a kill and a restart in one launch
    "launch/test_local.py::test_the_first_error_is_shown_with_its_rank": (),
    "launch/test_local.py::test_restart_goes_on_from_the_newest_checkpoint": (),
    "launch/test_start.py::test_a_world_of_verify": (),
    "launch/test_fuzz.py::test_no_setting_is_executed": ("cluster.srun",),
    "launch/test_slurm.py::test_a_cancelled_run_stays_cancelled": (),  # launch/test_after.py cancels a run, too
    "launch/test_slurm.py::test_what_slurm_would_refuse_is_refused_before_anything_is_written": (
        "cluster.partition=lwo", "cluster.gpus_per_node=4", "cluster.time=3", "cluster.mem=lots",
        "+cluster.sbatch.nonsense=1", "+cluster.sbatch.nodes=3",
    ),
    "launch/test_slurm.py::test_a_failure_names_the_rank_and_is_not_queued_again": (
        "settings3-1-raise ConnectionResetError(104, 'Connection reset by peer')-3-Connection reset by peer",
    ),
    "launch/test_slurm.py::test_a_sweep_is_one_array_and_goes_on_where_it_was": (),
    "launch/test_slurm.py::test_ctrl_c_on_one_of_two_nodes_ends_both_after_what_four_local_ranks_compute": (),
    "launch/test_slurm.py::test_two_nodes_of_two_ranks_compute_what_four_local_ranks_do": ("ddp",),
    "launch/test_slurm_odd.py::test_a_sweep_that_is_typed_twice_at_once_is_submitted_once": (),
    "launch/test_slurm_odd.py::test_a_run_that_has_ended_keeps_its_results": (),
    "launch/test_slurm_elastic.py::test_ten_events_on_three_nodes": (),
    "launch/test_slurm_hang.py::test_a_rank_of_another_node_that_hangs_is_named": (),
    # a mismatch of collectives: test_hang.py and test_supervisor.py find it in positions, report/test_why.py names it
    "faults/test_corpus.py::test_recognised": ("loader-stopped-ddp",),
    "launch/test_elastic.py::test_random_events": (),
    "launch/test_hang.py::test_with_warn_the_rank_is_only_named": (),
    # a stopped rank, and a loader of the corpus that is stopped, are named in real runs, too
    "launch/test_hang.py::test_the_rank_that_holds_up_the_others_is_named": (),
    # W&B and Trackio take 15 s to import and to end; the files of csv and TensorBoard prove the same of the follower
    "loggers/test_follow.py::test_a_killed_follower_loses_and_repeats_nothing": ("files",),
    # the restart in this file reports a failure, too
    "launch/test_script.py::test_a_failure_is_reported_as_for_our_own_runs": (),
    "launch/test_script.py::test_exit_code_2_is_a_bad_configuration_and_is_not_tried_again": (),
    "launch/test_script.py::test_preflight_comes_first": ("quick",),
    "launch/test_script.py::test_a_killed_rank_leaves_no_process_behind": ("rank",),
    "launch/test_script.py::test_a_progress_bar_is_shown_now_and_then": (),  # runs/test_folder.py reads one
    "launch/test_script.py::test_a_failed_save_after_a_stop_request_is_a_failure": (),
    # the tests' own cluster
    "launch/test_slurm_cluster.py::test_a_requeued_job_counts_its_restarts": (),
    "launch/test_slurm_cluster.py::test_a_node_with_a_network_dies_and_returns": (),
    "launch/test_slurm_cluster.py::test_accounting_answers_after_a_job": (),
    "launch/test_slurm_cluster.py::test_a_link_goes_down_and_up": (),
    "launch/test_slurm_cluster.py::test_jobs_survive_a_restart_of_the_controller": (),
    "launch/test_after.py::test_logs_follow_a_job_from_the_queue_through_a_requeue": (),
    "launch/test_after.py::test_with_accounting_the_past_is_known": (),
    "launch/test_nsys.py::test_nsys_goes_around_torchrun": (),
    "launch/test_nsys.py::test_nsys_goes_around_each_rank_of_a_slurm_job": (),
    "preflight/test_network.py::test_lost_nodes_are_named": (),
    "preflight/test_network.py::test_a_slow_link_is_named_and_can_be_left_out": (),
    "preflight/test_network.py::test_the_interface_of_the_profile_is_found_and_the_run_trains": (),
}  # fmt: skip


def is_long(test: str) -> bool:
    """Does only `make test-all` run this test? `test`: its id without tests/, e.g. fit.py::test_it[ddp]."""
    function, _, parameters = test.partition("[")
    return function in LONG and parameters.removesuffix("]") not in LONG[function]


def unknown(tests: list[str]) -> list[str]:
    """Lines of the table that name no test any more, of the files that these tests are in."""
    files = {test.partition("::")[0] for test in tests}
    known = {test.partition("[")[0] for test in tests} | set(tests)
    names = [function + (f"[{case}]" if case else "") for function, kept in LONG.items() for case in ("", *kept)]
    return [name for name in names if name.partition("::")[0] in files and name not in known]
