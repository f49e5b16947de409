"""Every setting of every daemon, and what commands call a server with.

One table, so that a process tells a misspelt `ASTRAFLOW_*` variable from one of another daemon that runs beside it; a
contract test compares it with the settings. Used by `settings`.
"""

_NAMES = """
    accept_data_loss activation_checkpointing address_file allow_recipe_code allow_volatile api_key_file
    apply_threads attention batch_lease_s ca_file cache_dir client_cert_file client_key_file
    coalesce_max_new_tokens compile context_length device drain_timeout_s durability engine engine_args
    engine_gpus engine_python engine_request_timeout_s engine_restart_backoff_s engine_stall_s
    engine_start_timeout_s engine_swap_timeout_s engine_threads engine_tp_size engine_update
    environment_ca_file environment_token_file environments evaluation_hold_s evaluation_patience_s external
    external_key_file failpoints failpoints_log failpoints_seed fetch_threads grpc_port hardware host
    http_allowed_hosts http_host http_port idle_timeout_s in_process_plugins insecure insecure_http join
    join_file join_timeout_s log_format log_level max_concurrent_tasks max_prefill_tokens max_queued_requests
    max_running_requests max_turns mirror_dir model_path name name_patience_s node_id node_silence_s
    num_threads offload parent_pid payloads payloads_password_file plan plan_json plan_memory_gib plan_on
    plan_ranks plugin_call_timeout_s plugin_memory_mb plugin_start_timeout_s policy pool port price_per_hour
    probe_host probe_port processes public_ca publish_snapshot push_journal rank_silence_s rank_timeout_s
    recipe recipe_overrides redis redis_password_file region replicas request_timeout_s revoked_tokens_file
    run_id scaler_client_ca_file scaler_port seed serve server_gone_timeout_s server_name server_silence_s
    session_timeout_s sessions_per_worker share_port source_work_dir spool_bytes spool_episodes stay steps
    store_checksum_mode store_credentials_file store_endpoint_url store_grant_life_s store_grants
    store_multipart_piece_bytes store_multipart_threshold_bytes store_path_style store_profile
    store_range_bytes store_region threads tls_cert_file tls_client_ca_file tls_key_file token_audience
    token_file token_keys_file traces training_stall_s use warm_start_threads weight_version with_ work_dir
    worker_sessions worker_start_timeout_s workers
"""
NAMES = frozenset(_NAMES.split())
