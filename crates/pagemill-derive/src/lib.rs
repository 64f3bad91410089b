//! `#[derive(Movable)]` for the values of a `HandleMap`. The crates `pagemill-slab` and `pagemill` export it beside the
//! trait.
//!
//! A value is movable if all its fields are. The derived code requires that of each field, so the derive is safe to use
//! although the trait is unsafe to implement by hand.
#![allow(unsafe_code)] // the derived code implements an unsafe trait

use proc_macro::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, parse_macro_input, parse_quote};

/// Implements the trait `Movable` for a struct or an enum whose fields all implement it.
///
/// ```
/// use pagemill::slab::{HandleMap, Movable};
///
/// #[derive(Movable)]
/// struct Session {
///     user: String,
///     hits: u64,
/// }
///
/// let sessions = HandleMap::new("sessions")?;
/// sessions.insert(Session { user: "ann".to_owned(), hits: 0 })?;
/// # Ok::<(), pagemill::Error>(())
/// ```
#[proc_macro_derive(Movable)]
pub fn derive_movable(input: TokenStream) -> TokenStream {
    let mut input = parse_macro_input!(input as DeriveInput);
    let fields: Vec<syn::Type> = match &input.data {
        Data::Struct(data) => data.fields.iter().map(|field| field.ty.clone()).collect(),
        Data::Enum(data) => {
            data.variants.iter().flat_map(|variant| &variant.fields).map(|field| field.ty.clone()).collect()
        }
        Data::Union(data) => {
            let text = "a union cannot derive Movable: the compiler does not know which of its fields is valid";
            return syn::Error::new(data.union_token.span, text).to_compile_error().into();
        }
    };
    let path = path_of_trait_module();
    let predicates = &mut input.generics.make_where_clause().predicates;
    predicates.extend(fields.iter().map(|field| -> syn::WherePredicate { parse_quote!(#field: #path::Movable) }));
    predicates.push(parse_quote!(Self: ::core::marker::Send + ::core::marker::Sync + 'static));
    let name = &input.ident;
    let (parameters, arguments, conditions) = input.generics.split_for_impl();
    quote! {
        // SAFETY: each field is movable, as the where clause requires.
        #[allow(unsafe_code)]
        unsafe impl #parameters #path::Movable for #name #arguments #conditions {}
    }
    .into()
}

/// Returns the path of the module that exports the trait `Movable`: `pagemill_slab` if the program depends on that
/// crate, otherwise `pagemill::slab`.
fn path_of_trait_module() -> proc_macro2::TokenStream {
    use proc_macro_crate::{FoundCrate, crate_name};
    let ident = |name: &str| syn::Ident::new(name, proc_macro2::Span::call_site());
    match (crate_name("pagemill-slab"), crate_name("pagemill")) {
        (Ok(FoundCrate::Itself), _) => quote!(::pagemill_slab),
        (Ok(FoundCrate::Name(name)), _) => {
            let name = ident(&name);
            quote!(::#name)
        }
        (_, Ok(FoundCrate::Name(name))) => {
            let name = ident(&name);
            quote!(::#name::slab)
        }
        _ => quote!(::pagemill::slab),
    }
}
